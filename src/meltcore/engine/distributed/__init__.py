"""Tensor-parallel ranks: their processes, messages and model runner."""
