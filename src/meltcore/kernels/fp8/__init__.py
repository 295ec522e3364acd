"""Kernels for FP8 weights, scaled by channel or by block, with their matrix multiplications."""
