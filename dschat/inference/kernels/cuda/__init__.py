"""Triton kernels of the decoder for CUDA; `dispatch` is the only module that the engine imports."""
