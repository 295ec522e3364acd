"""What the GPUs of this machine do while something else runs on them, read through NVML. No torch, no root."""
