"""Triton kernels, each with a reference implementation in PyTorch."""
