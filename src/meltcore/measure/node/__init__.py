"""Reads, monitors and certifies the GPUs of this machine. Only probes import torch, and nothing needs root."""
