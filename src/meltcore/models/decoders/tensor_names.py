"""The names of a decoder block's tensors in published checkpoints, and the weight loader of each tensor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from meltcore.kernels.rotary import half_split_order
from meltcore.layers.attention import Attention
from meltcore.layers.feed_forward import GatedMLP, SparseMoeBlock
from meltcore.layers.gated_delta_net import GatedDeltaNet
from meltcore.layers.weight_loader import WeightLoader, concatenated_loader, permuted_loader


class FusedTensor(NamedTuple):
    """A checkpoint tensor that merges several tensors.

    `checkpoint_names` are the names that these tensors usually have.
    """

    tensor: WeightLoader
    checkpoint_names: tuple[str, ...]


def norm_tensors(mixer: Attention | GatedDeltaNet, mlp: GatedMLP | SparseMoeBlock) -> dict[str, WeightLoader]:
    """Return the weight loaders of the norms before and after a block's layers, by tensor name.

    In a block with norms after its layers (Gemma 3, OLMo 2), post_attention_layernorm is the norm after attention. In
    other blocks the norm before the feed-forward has this name.
    """
    norms = {"input_layernorm": mixer.norm}
    if isinstance(mixer, Attention) and mixer.post_norm is not None:
        assert isinstance(mlp, GatedMLP)
        norms["post_attention_layernorm"] = mixer.post_norm
        norms["pre_feedforward_layernorm"] = mlp.norm
        norms["post_feedforward_layernorm"] = mlp.post_norm
    else:
        norms["post_attention_layernorm"] = mlp.norm
    return {f"{name}.weight": norm.loader for name, norm in norms.items() if norm is not None}


def attention_tensors(attention: Attention, rotary_dim: int) -> dict[str, WeightLoader]:
    """Return the weight loaders of an attention layer, by tensor name.

    The `rotary_dim` rotary dimensions of a head are reordered from the published order to half_split_order.
    """
    dim_order = half_split_order(attention.head_dim, rotary_dim)
    loaders = named_tensors("self_attn.o_proj", attention.o_proj.tensors(0))
    query_order, key_order = _query_order(attention, dim_order), _head_order(attention.num_kv_heads, dim_order)
    orders = (query_order, key_order, None)
    for matrix_index, (name, order) in enumerate(zip(("q_proj", "k_proj", "v_proj"), orders, strict=True)):
        loaders |= named_tensors(f"self_attn.{name}", attention.qkv_proj.tensors(matrix_index, order))
        if attention.qkv_proj.bias is not None:
            loaders[f"self_attn.{name}.bias"] = attention.qkv_proj.bias_loader(matrix_index, order)
    if attention.q_norm is not None and attention.k_norm is not None:
        loaders["self_attn.q_norm.weight"] = permuted_loader(attention.q_norm.loader, dim_order)
        loaders["self_attn.k_norm.weight"] = permuted_loader(attention.k_norm.loader, dim_order)
    if attention.wide_norms is not None:
        names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
        loaders |= dict(zip(names, attention.wide_norms.loaders(query_order, key_order), strict=True))
    return loaders


def _head_order(num_heads: int, dim_order: torch.Tensor) -> torch.Tensor:
    """Return the checkpoint's row for each row of `num_heads` heads.

    `dim_order` has the checkpoint's row for each row within a head.
    """
    return (torch.arange(num_heads)[:, None] * len(dim_order) + dim_order).flatten()


def _query_order(attention: Attention, dim_order: torch.Tensor) -> torch.Tensor:
    """Return the checkpoint's row for each row of gates and queries.

    In a checkpoint, each head's query is followed by its output gate. In this layer the gates of all heads precede the
    queries.
    """
    if not attention.output_gate:
        return _head_order(attention.num_heads, dim_order)
    query_and_gate_dims = torch.cat([dim_order, len(dim_order) + torch.arange(len(dim_order))])
    queries, gates = _head_order(attention.num_heads, query_and_gate_dims).view(attention.num_heads, 2, -1).unbind(1)
    return torch.cat([gates.flatten(), queries.flatten()])


def gated_delta_tensors(layer: GatedDeltaNet) -> dict[str, WeightLoader]:
    """Return the weight loaders of a Gated DeltaNet layer, by tensor name."""
    queries_keys_and_values = layer.in_proj.tensors(0, stop=3)
    return {
        **named_tensors("linear_attn.in_proj_qkv", queries_keys_and_values),
        **named_tensors("linear_attn.in_proj_z", layer.in_proj.tensors(3)),
        **named_tensors("linear_attn.in_proj_b", layer.in_proj.tensors(4)),
        **named_tensors("linear_attn.in_proj_a", layer.in_proj.tensors(5)),
        **named_tensors("linear_attn.out_proj", layer.out_proj.tensors(0)),
        "linear_attn.conv1d.weight": layer.conv_loader(),
        "linear_attn.A_log": layer.head_loader(layer.a_log),
        "linear_attn.dt_bias": layer.head_loader(layer.dt_bias),
        "linear_attn.norm.weight": layer.value_norm,
    }


def dense_tensors(mlp: GatedMLP) -> dict[str, WeightLoader]:
    """Return the weight loaders of a dense feed-forward, by tensor name."""
    return {
        **named_tensors("mlp.gate_proj", mlp.gate_up_proj.tensors(0)),
        **named_tensors("mlp.up_proj", mlp.gate_up_proj.tensors(1)),
        **named_tensors("mlp.down_proj", mlp.down_proj.tensors(0)),
    }


def expert_tensors(mlp: SparseMoeBlock) -> dict[str, WeightLoader]:
    """Return the weight loaders of the router and of each expert, by tensor name."""
    loaders: dict[str, WeightLoader] = {"mlp.gate.weight": mlp.router[: mlp.num_experts]}
    names = [f"mlp.experts.{expert}" for expert in range(mlp.num_experts)]
    if mlp.shared_expert:
        loaders["mlp.shared_expert_gate.weight"] = mlp.router[mlp.num_experts :]
        names.append("mlp.shared_expert")
    for expert, name in enumerate(names):
        loaders |= named_tensors(f"{name}.gate_proj", mlp.experts.gate_tensors(expert))
        loaders |= named_tensors(f"{name}.up_proj", mlp.experts.up_tensors(expert))
        loaders |= named_tensors(f"{name}.down_proj", mlp.experts.down_tensors(expert))
    return loaders


def fused_expert_tensors(mlp: SparseMoeBlock) -> dict[str, FusedTensor]:
    """Return the tensors of checkpoints that merge all routed experts in one tensor, by tensor name."""
    names = [name for name in expert_tensors(mlp) if ".experts." in name]
    fused: dict[str, FusedTensor] = {}
    for fused_name, parts, tensors in (
        ("gate_up_proj", ("gate_proj", "up_proj"), mlp.experts.fused_gate_up_tensors(mlp.num_experts)),
        ("down_proj", ("down_proj",), mlp.experts.fused_down_tensors(mlp.num_experts)),
    ):
        for end, tensor in tensors.items():
            merged = tuple(name for name in names if name.endswith(tuple(f".{part}.{end}" for part in parts)))
            fused[f"mlp.experts.{fused_name}{end.removeprefix('weight')}"] = FusedTensor(tensor, merged)
    return fused


def merged_tensors(tensors: Mapping[str, WeightLoader]) -> dict[str, FusedTensor]:
    """Return the tensors of checkpoints that merge matrices with the same input (Phi-3), by name.

    `tensors` are the tensors of a block. Weights and their scales per row can be merged; other scales and packed
    integers cannot.
    """
    merged: dict[str, FusedTensor] = {}
    for module, parts in (
        ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
    ):
        for end in ("weight", "weight_scale"):
            names = tuple(f"{part}.{end}" for part in parts)
            if all(name in tensors and len(tensors[name].shape) == 2 for name in names):
                merged[f"{module}.{end}"] = FusedTensor(concatenated_loader([tensors[name] for name in names]), names)
    return merged


def named_tensors(module: str, tensors: Mapping[str, WeightLoader]) -> dict[str, WeightLoader]:
    """Return the weight loaders of a module's tensors by their full names.

    `tensors` has the loaders by the last part of these names.
    """
    return {f"{module}.{end}": tensor for end, tensor in tensors.items()}
