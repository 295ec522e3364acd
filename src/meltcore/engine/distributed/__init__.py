"""Runs tensor-parallel ranks: their processes, messages and model runner."""
