"""Reads, monitors and certifies the GPUs of this machine. No torch outside the probes, no root."""
