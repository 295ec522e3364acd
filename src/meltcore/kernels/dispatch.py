"""Which body of a kernel runs: Triton's on CUDA, the torch reference elsewhere."""

import torch

_reference_only = False


def force_reference(on: bool) -> None:
    """Run the torch bodies on CUDA too, in this process (`--debug reference-kernels`, for bisecting)."""
    global _reference_only
    _reference_only = on


def use_triton(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and not _reference_only
