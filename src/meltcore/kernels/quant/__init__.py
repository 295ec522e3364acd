"""Kernels for INT4 and the block-quantized formats of GGUF files, with their matrix multiplications."""
