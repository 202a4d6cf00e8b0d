"""Kernels of the decoder, on tensors and sizes.

`cpu` has kernels in C, compiled on first use; `cuda` has Triton's.
"""
