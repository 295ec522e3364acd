"""Kernels that start while the one before them still runs (programmatic dependent launch, sm_90 and later).

A step of few tokens is a chain of kernels of a few microseconds, and between two of them the memory stands idle: the
last programs of one end, the next are started, and only then ask for their weights. A kernel launched with
`launch_pdl=True` is started as soon as every program of its predecessor has ended or has called
`tl.extra.cuda.gdc_launch_dependents`. It may then read what no recent kernel wrote, its weights, and must call
`tl.extra.cuda.gdc_wait` before anything else: that returns once the predecessor has ended and its writes can be seen.
Every kernel launched so waits, so the end of one still means the end of all before it. (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"; a captured graph keeps it.)
"""

from __future__ import annotations

from functools import cache

import torch

from meltcore.kernels.jit import triton

_LEAST_CAPABILITY = 90


def overlaps(device: torch.device) -> bool:
    """Whether kernels for tensors on `device` are to be compiled and launched so. False for the interpreter's CPU."""
    if device.type == "cuda":
        return _capability(device) >= _LEAST_CAPABILITY
    return device.type != "cpu" and triton.runtime.driver.active.get_current_target().arch >= _LEAST_CAPABILITY


@cache
def _capability(device: torch.device) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
