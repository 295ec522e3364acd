"""Reads GPUs through NVML: the driver's calls, metrics, device selection and XID errors.

Needs neither torch nor root.
"""
