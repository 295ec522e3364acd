"""Selects the layers of a model that are quantized, and checks that the device supports the format."""

from __future__ import annotations

import torch

from meltcore.errors import ConfigError
from meltcore.kernels.quant.fp8 import FP8_CAPABILITY
from meltcore.kernels.quant.fp8_linear import SIZE_MULTIPLE
from meltcore.layers.linear import LinearBase
from meltcore.layers.quantization import FP8_PER_CHANNEL
from meltcore.models.model import Model


def require_fp8(option: str, device: torch.device) -> None:
    """Raise ConfigError when `device` is a GPU that cannot convert e4m3."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if 10 * major + minor < FP8_CAPABILITY:
        raise ConfigError(
            f"{option} needs compute capability {FP8_CAPABILITY / 10} or later; "
            f"{torch.cuda.get_device_name(device)} has {major}.{minor}"
        )


def quantize_to_fp8(model: Model, device: torch.device) -> None:
    """Make every linear layer of the blocks store its weight in FP8. `model` must still be on the meta device.

    The embedding and the head keep their type, since an error in a logit directly changes a token. On a CPU the torch
    reference runs, which is slow but gives the same answers. Raises ConfigError when the GPU has no FP8, the model is
    not bfloat16 on a GPU, or a layer's size is not a multiple of SIZE_MULTIPLE.
    """
    require_fp8("--quantization fp8", device)
    if device.type == "cuda" and model.dtype != torch.bfloat16:
        dtype = str(model.dtype).removeprefix("torch.")
        raise ConfigError(f"--quantization fp8 computes with --dtype bfloat16 around it on CUDA; got {dtype}")
    for name, layer in model.named_modules():
        if isinstance(layer, LinearBase):
            sizes = (sum(layer.output_sizes), layer.input_size)
            if any(size % SIZE_MULTIPLE for size in sizes):
                raise ConfigError(
                    f"--quantization fp8 needs sizes that are multiples of {SIZE_MULTIPLE}; {name} has {list(sizes)}"
                )
            layer.quantize(FP8_PER_CHANNEL)
