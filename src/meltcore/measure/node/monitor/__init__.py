"""Samples GPUs from a process of its own, and summarizes and judges the samples."""
