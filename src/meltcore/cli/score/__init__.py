"""Commands of the GPU score and of submissions."""
