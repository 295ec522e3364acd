"""Models that share GPUs: sleep and wake, turns, residency, MPS."""
