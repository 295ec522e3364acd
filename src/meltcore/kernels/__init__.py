"""Triton and CUDA kernels. Each has a reference implementation in PyTorch."""
