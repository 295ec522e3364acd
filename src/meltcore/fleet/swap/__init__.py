"""Lets models share GPUs: sleep and wake-up, turns, residency, and MPS."""
