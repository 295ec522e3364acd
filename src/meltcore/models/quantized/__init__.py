"""Quantized weights: methods, published formats, sizes."""
