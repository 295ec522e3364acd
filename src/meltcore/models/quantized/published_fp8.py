"""Makes the layers of a model keep the FP8 weights of a published checkpoint, as its quantization_config says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from meltcore.common.errors import ConfigError
from meltcore.kernels.fp8.block_fp8 import BLOCK
from meltcore.layers.embedding import ParallelLMHead
from meltcore.layers.feed_forward import SparseMoeBlock
from meltcore.layers.fp8_weights import StoredScales, stored_fp8_method
from meltcore.layers.quantization import UNQUANTIZED, QuantizationMethod
from meltcore.models.configs.quantization_config import BlockFp8Config, CompressedFp8Config
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.model import Model
from meltcore.models.quantized.quantization import (
    check_fp8_device,
    modules_of_experts,
    quantize_fp8_layer,
    tensors_of_layers,
)

Fp8Config = BlockFp8Config | CompressedFp8Config


def keep_published_fp8(model: Model, config: Fp8Config, device: torch.device) -> None:
    """Make every layer of a model on the meta device keep the FP8 weights of a published checkpoint.

    Embedding, output head and routers are not quantized in these formats. Raises ConfigError if the GPU has no FP8, if
    only some experts of a layer are quantized, or if the format does not allow a size.
    """
    option = f"quant_method {config.quant_method}"
    check_fp8_device(option, model, device)
    assert isinstance(model, Decoder)
    for layer, names in tensors_of_layers(model):
        if isinstance(layer, ParallelLMHead):
            continue
        modules = [name.removesuffix(".weight") for name in names]
        row_multiple = _row_multiple(model) if modules[0].endswith(".q_proj") else BLOCK
        methods = [fp8_method(config, module, row_multiple) for module in modules]
        if isinstance(layer, SparseMoeBlock):
            _check_experts(config, modules, layer)
        if any(method is not UNQUANTIZED for method in methods):
            quantize_fp8_layer(layer, names, methods, option)


def fp8_method(config: Fp8Config, module: str, row_multiple: int) -> QuantizationMethod:
    """Return the quantization method of a module."""
    strategy = config.strategy(module)
    if strategy is None:
        return UNQUANTIZED
    return stored_fp8_method(StoredScales(strategy, config.scale_suffix), row_multiple)


def _row_multiple(model: Decoder) -> int:
    """Return how many neighboring rows of queries, keys and values keep their order: see `half_split_order`."""
    head_dim, rotary_dim = model.config.head_dim, model.config.rotary_dim
    return head_dim if rotary_dim == head_dim else math.gcd(head_dim // 2, rotary_dim // 2)


def _check_experts(config: Fp8Config, first_expert: Sequence[str], layer: SparseMoeBlock) -> None:
    """Raise ConfigError unless all experts of a layer are quantized in the same way.

    `first_expert` names the modules of expert 0.
    """
    modules = modules_of_experts(layer, first_expert)
    different = [module for module in modules if config.strategy(module) != config.strategy(modules[0])]
    if different:
        raise ConfigError(
            f"config.json: quantization_config quantizes {modules[0]} and {different[0]} differently; "
            "the experts of a layer must have one format"
        )
