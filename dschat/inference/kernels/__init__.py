"""Kernels of the decoder, on tensors and sizes.

`cpu` has those in C, compiled on first use; `cuda` those of Triton.
"""
