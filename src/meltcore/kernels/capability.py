"""What the processor that a kernel is compiled for can do, from its compute capability (90: Hopper)."""

from __future__ import annotations

from functools import cache

import torch

from meltcore.kernels.jit import triton

# Shared memory that one program may have, KiB (CUDA C++ Programming Guide, compute capabilities).
_SHARED_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 103: 227, 110: 227}
_LEAST_SHARED_KIB = 99
_H200_PROCESSORS = 132


def capability(device: torch.device) -> int:
    """Of a CUDA device; of the compiler's target for the meta device; 0 for the CPU, where kernels are interpreted."""
    if device.type == "cuda":
        return _of_device(device)
    return 0 if device.type == "cpu" else triton.runtime.driver.active.get_current_target().arch


def shared_bytes(device: torch.device) -> int:
    """Shared memory that one program may have."""
    return 1024 * _SHARED_KIB.get(capability(device), _LEAST_SHARED_KIB)


def processors(device: torch.device) -> int:
    """Multiprocessors of a CUDA device; elsewhere an H200's, for which launches are then compiled."""
    return _processors(device) if device.type == "cuda" else _H200_PROCESSORS


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _of_device(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
