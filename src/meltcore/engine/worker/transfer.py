"""Small arrays between host and device, without a wait on either side."""

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
        """entries: int64 per slot at first; a slot grows when more are asked for."""
        self._slots = [(pinned(entries), cuda_event()) for _ in range(STAGING_SLOTS)]
        self._taken = 0

    def take(self, entries: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """Take a staging slot.

        Returns [entries] int64, and the event to record after the launch of the kernel that reads it.
        """
        index = self._taken % STAGING_SLOTS
        self._taken += 1
        slot, read = self._slots[index]
        read.synchronize()
        if len(slot) < entries:
            slot = pinned(entries)
            self._slots[index] = slot, read
        return slot[:entries], read


def cuda_event() -> torch.cuda.Event:
    """A new event, which torch declares without types."""
    make: Callable[[], torch.cuda.Event] = torch.cuda.Event
    return make()


def pinned(*shape: int) -> torch.Tensor:
    """Zeros of int64 in pinned host memory."""
    return torch.zeros(shape, dtype=torch.int64, pin_memory=True)


def aligned(size: int) -> int:
    """Entries of int64 up to the next multiple of 16 bytes: kernels are compiled for aligned arrays."""
    return size + size % 2


def to_device(values: Sequence[Any] | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`, on CUDA by an asynchronous copy in the stream's order."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def to_device_together(arrays: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of int64 on `device` by a single copy, since each copy costs the host about as much as a kernel launch.

    Each tensor starts at a multiple of 16 bytes, for which kernels are compiled.
    """
    lengths = [len(array) for array in arrays]
    starts = np.cumsum([0, *map(aligned, lengths)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for array, start, length in zip(arrays, starts, lengths, strict=False):
        host[start : start + length] = array
    sent = packed.to(device, non_blocking=True)
    return [sent[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host, complete once the stream has passed this point."""
    if tensor.device.type != "cuda":
        return tensor
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)
