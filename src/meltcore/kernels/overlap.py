"""Kernels that start while the one before them still runs (programmatic dependent launch, sm_90 and later).

A step of few tokens is a chain of kernels of a few microseconds, and between two of them the memory stands idle: the
last programs of one end, the next are started, and only then ask for their weights. A kernel launched with
`launch_pdl=True` is started as soon as every program of its predecessor has ended or has called
`tl.extra.cuda.gdc_launch_dependents`. It may then read what no recent kernel wrote, its weights, and must call
`tl.extra.cuda.gdc_wait` before anything else: that returns once the predecessor has ended and its writes can be seen.
Every kernel launched so waits, so the end of one still means the end of all before it. (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"; a captured graph keeps it.)
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.capability import capability
from meltcore.kernels.jit import tl, triton

_LEAST_CAPABILITY = 90


def overlaps(device: torch.device) -> bool:
    """Whether kernels for tensors on `device` are to be compiled and launched so."""
    return capability(device) >= _LEAST_CAPABILITY


@triton.jit
def prefetch(pointers):
    """Ask for the 128-byte lines at `pointers` to come to the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
