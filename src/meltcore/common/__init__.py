"""Modules that all packages may import: errors, processes, options, files, host memory, versions and GPUs."""
