"""Pages of the GPU score."""
