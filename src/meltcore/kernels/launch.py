"""Selects the implementation that a launch runs, and implements programmatic dependent launch (PDL).

A function of this package checks its arguments, computes the launch parameters and launches a Triton kernel. On other
devices it calls its reference implementation in PyTorch, named `..._reference`, which is the kernel's specification.

PDL needs sm_90 or later. A decode step is a chain of kernels of a few microseconds. Without PDL the memory would idle
between the last programs of one kernel and the first loads of the next. A kernel launched with PDL starts as soon as
every program of the previous kernel has exited or has called `pdl_launch_dependents`. Before `pdl_wait` returns it may
only read what no recent kernel wrote: weights and page tables. Every kernel launched with PDL calls `pdl_wait`, so the
end of a kernel still means the end of all kernels before it. Captured CUDA graphs keep the dependency. (CUDA C++
Programming Guide, "Programmatic Dependent Launch and Synchronization".)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meltcore.kernels.capability import capability
from meltcore.kernels.jit import tl, triton

_PDL_CAPABILITY = 90
_WITH_PDL = {"PDL": True, "launch_pdl": True}
_WITHOUT_PDL = {"PDL": False}

_ATTENTION_WITHOUT_CUDNN = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]

_forced_triton: bool | None = None


def force_implementation(name: Literal["reference", "triton"] | None) -> None:
    """Make this process run one implementation on every device. None selects the implementation by device again.

    "reference" is for bisecting (`--debug reference-kernels`). "triton" is for Triton's interpreter, and for compiling
    kernels from tensors of the meta device.
    """
    global _forced_triton
    _forced_triton = None if name is None else name == "triton"


def use_triton(tensor: torch.Tensor) -> bool:
    """Return whether the Triton kernel runs for this tensor: on CUDA, unless an implementation is forced."""
    return tensor.is_cuda if _forced_triton is None else _forced_triton


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Make torch compute attention and convolutions with kernels that are the same for all shapes.

    cuDNN compiles and chooses kernels for each shape. It held up the first batch of a shape by 60 to 90 ms for
    attention, and by 350 ms and more with convolutions (H200).
    """
    with sdpa_kernel(_ATTENTION_WITHOUT_CUDNN), torch.backends.cudnn.flags(enabled=False):
        yield


def pdl_options(device: torch.device, enabled: bool = True) -> dict[str, bool]:
    """Return the keyword arguments of a launch: the constexpr PDL, and `launch_pdl` if the device has PDL.

    `enabled` is False for a launch that should not start early.
    """
    return _WITH_PDL if enabled and capability(device) >= _PDL_CAPABILITY else _WITHOUT_PDL


@triton.jit
def pdl_launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start as soon as every program of this one has called this or exited."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its writes are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def pdl_sync(PDL: tl.constexpr):
    """Call `pdl_launch_dependents` and `pdl_wait`, in a kernel that has nothing to load before it waits."""
    pdl_launch_dependents(PDL)
    pdl_wait(PDL)


@triton.jit
def prefetch(pointers):
    """Load the 128-byte lines at `pointers` into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // $0", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
