"""The checks, one a file. None imports torch: what runs on the GPU is a probe, in a process of its own."""
