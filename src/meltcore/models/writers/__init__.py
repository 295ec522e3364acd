"""Writes weights in fewer bits: GGUF and FP8."""
