"""Kernels for quantized formats and their matrix multiplications."""
