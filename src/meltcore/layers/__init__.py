"""Layers of a decoder: modules that hold weights, shard them and call kernels."""
