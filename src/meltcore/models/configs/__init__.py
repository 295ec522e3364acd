"""Reads configuration files: fields, tasks and quantization. It never imports torch."""
