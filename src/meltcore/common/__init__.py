"""Modules that every part may import: errors, processes, options, files, host memory, versions, GPUs."""
