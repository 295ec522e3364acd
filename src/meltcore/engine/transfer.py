"""Small arrays from the host to the device without making either wait."""

from collections.abc import Sequence

import numpy as np
import torch


def to_device(values: Sequence | np.ndarray, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`; from pinned memory on CUDA, so that the copy runs in the stream's order."""
    tensor = torch.as_tensor(values, dtype=dtype)
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor


def to_device_together(arrays: Sequence[Sequence[int] | np.ndarray], device: torch.device) -> list[torch.Tensor]:
    """Tensors of int64 on `device` by one copy, since every copy costs the host about as much as a kernel's launch.

    Each starts at a multiple of 16 bytes, which kernels are compiled for.
    """
    lengths = [len(array) for array in arrays]
    starts = np.cumsum([0, *(length + length % 2 for length in lengths)]).tolist()
    packed = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    host = packed.numpy()
    for array, start, length in zip(arrays, starts, lengths, strict=False):
        host[start : start + length] = array
    sent = packed.to(device, non_blocking=True)
    return [sent[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is complete once the stream has passed this point."""
    if tensor.device.type != "cuda":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
