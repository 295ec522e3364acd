"""Lets models share GPUs: sleep and wake-up, which models are awake, when they swap, and MPS."""
