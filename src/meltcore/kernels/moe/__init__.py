"""Kernels of mixture-of-experts layers: routing, alignment, grouped GEMM and the weighted sum of expert outputs."""
