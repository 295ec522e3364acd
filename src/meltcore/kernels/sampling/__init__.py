"""Kernels that select tokens from logits: argmax, sampling, top-k, top-p, min-p and penalties."""
