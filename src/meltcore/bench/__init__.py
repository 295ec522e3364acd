"""The GPU score: one number that ranks GPUs, how it came about, and how the GPU was meanwhile."""
