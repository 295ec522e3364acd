"""Selects the decoders whose decode steps of few sequences run in one launch instead of a chain of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meltcore.kernels.attention.metadata import HeadNorms
from meltcore.kernels.persistent.decode_layers import DecodeLayer, DecodeLayers, supports
from meltcore.layers.attention import Attention
from meltcore.layers.feed_forward import GatedMLP
from meltcore.layers.quantization import DenseWeight


def persistent_layers(
    layers: Sequence[tuple[nn.Module, nn.Module]],
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rotary: torch.Tensor,
) -> DecodeLayers | None:
    """Return the layers for decode steps of few sequences. Returns None if the kernel does not support one of them.

    `layers` has pairs of mixer and feed-forward.
    """
    candidates = [_decode_layer(*layer, *cache) for layer, cache in zip(layers, caches, strict=True)]
    supported = [layer for layer in candidates if layer is not None]
    if len(supported) < len(candidates) or not supports(supported):
        return None
    scale: Any = layers[0][0].scale
    return DecodeLayers(supported, rotary, scale)


def _decode_layer(attention: nn.Module, mlp: nn.Module, keys: torch.Tensor, values: torch.Tensor) -> DecodeLayer | None:
    """Return a layer of unquantized and unsharded weights. Returns None if the kernel does not support the layer."""
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP) or mlp.activation != "silu":
        return None
    has_unsupported_feature = (
        attention.output_gate
        or attention.sliding_window is not None
        or attention.qkv_proj.bias is not None
        or attention.post_norm is not None
        or mlp.post_norm is not None
        or attention.o_proj.is_sharded
    )
    if has_unsupported_feature:
        return None
    if attention.q_norm is None or attention.k_norm is None or attention.wide_norms is not None:
        return None
    if attention.norm is None or mlp.norm is None:
        return None
    projections = (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj)
    weights = [each.weight.values for each in projections if isinstance(each.weight, DenseWeight)]
    if len(weights) < len(projections):
        return None
    qkv, output, gate_up, down = weights
    return DecodeLayer(
        attention.norm.parameters_for_fusion(),
        qkv,
        HeadNorms(attention.q_norm.weight, attention.k_norm.weight, attention.q_norm.eps),
        output,
        mlp.norm.parameters_for_fusion(),
        gate_up,
        down,
        keys,
        values,
    )
