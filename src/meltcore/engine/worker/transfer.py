"""Copies small arrays between host and device, without a wait on either side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

# Slots of a staging buffer, used in turn. A step is launched before the one before it has been read, but never two, so
# the host waits for none of them.
STAGING_SLOTS = 4


class StagingBuffer:
    """Pinned host memory that kernels read directly, without a copy command.

    torch's own pool of pinned memory tracks copies only, and would reuse such memory too early.
    """

    def __init__(self, entries: int) -> None:
        """Allocate slots of `entries` int64. A slot grows when more are requested."""
        self._slots = [(pinned_zeros(entries), cuda_event()) for _ in range(STAGING_SLOTS)]
        self._num_taken = 0

    def take(self, entries: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Take a staging slot.

        Returns [entries] int64, and the event to record after the launch of the kernel that reads it.
        """
        index = self._num_taken % STAGING_SLOTS
        self._num_taken += 1
        slot, read_event = self._slots[index]
        read_event.synchronize()
        if len(slot) < entries:
            slot = pinned_zeros(entries)
            self._slots[index] = slot, read_event
        return slot[:entries], read_event


def cuda_event() -> torch.cuda.Event:
    """Return a new CUDA event. torch declares its constructor without types."""
    make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
    return make_event()


def pinned_zeros(*shape: int) -> torch.Tensor:
    """Return zeros of int64 in pinned host memory."""
    return torch.zeros(shape, dtype=torch.int64, pin_memory=True)


def align_entries(size: int) -> int:
    """Round a number of int64 up to a multiple of 16 bytes: kernels are compiled for aligned arrays."""
    return size + size % 2


def to_device(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy `values` to a tensor on `device`, on CUDA asynchronously in the stream's order."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def to_device_together(arrays: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Copy arrays to int64 tensors on `device` in a single copy, which costs the host about as much as a kernel launch.

    Each tensor starts at a multiple of 16 bytes, for which kernels are compiled.
    """
    lengths = [len(array) for array in arrays]
    starts = np.cumsum([0, *map(align_entries, lengths)]).tolist()
    host_buffer = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    host_array = host_buffer.numpy()
    for array, start, length in zip(arrays, starts, lengths, strict=False):
        host_array[start : start + length] = array
    device_buffer = host_buffer.to(device, non_blocking=True)
    return [device_buffer[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host. The copy is complete once the stream has passed this point."""
    if tensor.device.type != "cuda":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
