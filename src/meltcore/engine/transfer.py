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


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is complete once the stream has passed this point."""
    if tensor.device.type != "cuda":
        return tensor
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)
