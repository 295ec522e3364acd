"""Kernels for FP8 weights, scaled by channel or by block, and their matrix multiplications."""
