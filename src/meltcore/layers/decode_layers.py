"""Selects the decoders whose decode steps of few sequences run in fewer launches than a chain of kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from meltcore.kernels.attention.metadata import HeadNorms
from meltcore.kernels.persistent import layer_gemms
from meltcore.kernels.persistent.decode_layers import MAX_TOKENS, DecodeLayer, DecodeLayers, supports
from meltcore.kernels.persistent.layer_gemms import LayerGemms
from meltcore.layers.attention import Attention
from meltcore.layers.feed_forward import GatedMLP
from meltcore.layers.quantization import DenseWeight


class PersistentLayers:
    """The layers of a decoder for decode steps of few sequences: in one launch, or with one between two attentions."""

    def __init__(self, layers: Sequence[DecodeLayer], rotary: torch.Tensor, scale: float) -> None:
        """Take layers that the persistent kernel supports. scale: of the scores."""
        self._whole = DecodeLayers(layers, rotary, scale)
        supported = layer_gemms.supports(layers, rotary.shape[0])
        self._between = LayerGemms(layers, rotary, scale) if supported else None

    @property
    def max_tokens(self) -> int:
        """Maximum number of sequences of a step."""
        return MAX_TOKENS if self._between is None else layer_gemms.MAX_TOKENS

    def run(
        self, hidden: torch.Tensor, positions: torch.Tensor, page_table: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return the residual stream after all layers, in `hidden` [tokens, hidden_size] or new memory."""
        if self._between is not None and len(hidden) > MAX_TOKENS:
            return self._between.run(hidden, positions, page_table, rows)
        return self._whole.run(hidden, positions, page_table, rows)


def persistent_layers(
    layers: Sequence[tuple[nn.Module, nn.Module]],
    caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    rotary: torch.Tensor,
) -> PersistentLayers | None:
    """Return layers, pairs of mixer and feed-forward, for few sequences; None where the kernels do not support one."""
    found = [_decode_layer(*layer, *cache) for layer, cache in zip(layers, caches, strict=True)]
    supported = [layer for layer in found if layer is not None]
    if len(supported) < len(found) or not supports(supported, rotary.shape[0]):
        return None
    scale: Any = layers[0][0].scale
    return PersistentLayers(supported, rotary, scale)


def _decode_layer(attention: nn.Module, mlp: nn.Module, keys: torch.Tensor, values: torch.Tensor) -> DecodeLayer | None:
    """Return a layer of unquantized and unsharded weights; None if it is another, or has what the kernel does not."""
    if not isinstance(attention, Attention) or not isinstance(mlp, GatedMLP) or mlp.activation != "silu":
        return None
    has_more = attention.output_gate or attention.sliding_window is not None or attention.qkv_proj.bias is not None
    if has_more or attention.post_norm is not None or mlp.post_norm is not None or attention.o_proj.is_sharded:
        return None
    if attention.q_norm is None or attention.k_norm is None:
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
