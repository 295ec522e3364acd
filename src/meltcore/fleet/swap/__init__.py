"""Models that share GPUs: sleep and wake-up, turns, residency, and MPS."""
