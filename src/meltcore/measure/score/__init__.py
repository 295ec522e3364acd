"""The GPU score: one number that ranks GPUs, its measurements, and the GPU's health during the measurements."""
