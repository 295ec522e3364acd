"""The GPU score: one number that ranks GPUs, the measurements behind it, and the GPU's health during them."""
