"""Reads GPUs through NVML: the driver's calls, metrics, facts, device selection and XID errors. No torch, no root."""
