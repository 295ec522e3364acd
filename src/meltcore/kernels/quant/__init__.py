"""Kernels for block-quantized formats, those of GGUF files and INT4, and their matrix multiplications."""
