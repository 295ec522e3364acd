"""Kernels that stay on the SMs for many layers."""
