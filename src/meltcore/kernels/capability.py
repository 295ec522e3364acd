"""Properties of the device that a kernel is compiled for."""

from __future__ import annotations

from functools import cache

import torch

from meltcore.kernels.architectures import ARCHITECTURES, shared_kib
from meltcore.kernels.jit import triton

_INTERPRETER_SMS = 132  # the interpreter computes what an H200 would launch


def capability(device: torch.device) -> int:
    """Return the compute capability of a device as 10 * major + minor (90: Hopper).

    For the meta device it is the capability of the compiler's target. For a CPU, where kernels are interpreted, it is
    0.
    """
    if device.type == "cuda":
        return _capability(device)
    return 0 if device.type == "cpu" else triton.runtime.driver.active.get_current_target().arch


def shared_memory_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one program may use."""
    return 1024 * shared_kib(capability(device))


def sm_count(device: torch.device) -> int:
    """Return the number of streaming multiprocessors (SMs) of a CUDA device.

    For the meta device it is the number of a large GPU of the compiler's target architecture.
    """
    if device.type == "cuda":
        return _sm_count(device)
    target = ARCHITECTURES.get(capability(device))
    return target.sms if target else _INTERPRETER_SMS


@cache
def _sm_count(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
