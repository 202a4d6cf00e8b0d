"""C kernels of the decoder for CPUs, and their compilation."""
