"""Which layers of a network are quantised, and where that can be computed."""

from __future__ import annotations

import torch

from meltcore.errors import ConfigError
from meltcore.kernels.fp8 import FP8_CAPABILITY
from meltcore.kernels.fp8_linear import SIZE_MULTIPLE
from meltcore.layers.linear import Linear
from meltcore.models.decoder import Decoder


def require_fp8(option: str, device: torch.device) -> None:
    """Raise ConfigError where `device` is a GPU that does not convert e4m3."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < FP8_CAPABILITY:
        raise ConfigError(
            f"{option} needs compute capability {FP8_CAPABILITY / 10} or later; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )


def hold_in_fp8(model: Decoder, device: torch.device) -> None:
    """Make every linear layer of the blocks hold its weight in FP8, while `model` is still on the meta device.

    The embedding and the head stay as they are: an error in a logit decides about a token at once. On a CPU the torch
    bodies run, which is slow and shows what FP8 does to answers. Raises ConfigError where the GPU is too old, the
    model's type has no kernel, or a layer's size no instruction.
    """
    require_fp8("--quantization fp8", device)
    if device.type == "cuda" and model.embedding.dtype != torch.bfloat16:
        dtype = str(model.embedding.dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization fp8 computes with --dtype bfloat16 around it on CUDA; got {dtype}")
    for name, layer in model.named_modules():
        if isinstance(layer, Linear):
            sizes = (sum(layer.output_sizes), layer.input_size)
            if any(size % SIZE_MULTIPLE for size in sizes):
                raise ConfigError(
                    f"--quantization fp8 needs sizes that are multiples of {SIZE_MULTIPLE}; {name} has {list(sizes)}"
                )
            layer.to_fp8()
