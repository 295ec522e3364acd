"""Kernels of Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) in the form of Qwen3-Next and Qwen3.5."""
