"""Kernels of the decoder: C for CPUs, compiled on first use; Triton for CUDA."""
