"""Kernels of the decoder and their loaders."""
