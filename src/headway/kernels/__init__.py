"""Triton kernels, each with a PyTorch reference in the same file."""
