"""What the tensors of a decoder's block are called in published checkpoints, and where in our layers they go."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.rotary import half_split
from meltcore.layers.attention import Attention
from meltcore.layers.delta_net import DeltaNet
from meltcore.layers.destination import Destination, reordered
from meltcore.layers.mlp import GatedMLP
from meltcore.layers.moe import RoutedMLP


class FusedTensor(NamedTuple):
    """A tensor in which some checkpoints hold several of ours. stands_for: the names of those."""

    tensor: Destination
    stands_for: tuple[str, ...]


def attention_tensors(attention: Attention, rotary_dim: int) -> dict[str, Destination]:
    """rotary_dim: how many of a published head's dimensions turn; ours are in the order of kernels/rotary.py."""
    dims = half_split(attention.head_dim, rotary_dim)
    table: dict[str, Destination] = {"self_attn.o_proj.weight": attention.output.part(0)}
    orders = (_query_order(attention, dims), _head_order(attention.kv_heads, dims), None)
    for part, (name, order) in enumerate(zip(("q_proj", "k_proj", "v_proj"), orders, strict=True)):
        table[f"self_attn.{name}.weight"] = attention.qkv.part(part, order)
        if attention.qkv.bias is not None:
            table[f"self_attn.{name}.bias"] = attention.qkv.bias_part(part, order)
    if attention.query_norm is not None and attention.key_norm is not None:
        table["self_attn.q_norm.weight"] = reordered(attention.query_norm.destination, dims)
        table["self_attn.k_norm.weight"] = reordered(attention.key_norm.destination, dims)
    return table


def _head_order(heads: int, dims: torch.Tensor) -> torch.Tensor:
    """Which published row of neighbouring heads stands at each place, from that of one head."""
    return (torch.arange(heads)[:, None] * len(dims) + dims).flatten()


def _query_order(attention: Attention, dims: torch.Tensor) -> torch.Tensor:
    """The same for queries. Published output gates follow their heads one by one; here all come before the queries."""
    if not attention.output_gate:
        return _head_order(attention.heads, dims)
    both = torch.cat([dims, len(dims) + torch.arange(len(dims))])
    queries, gates = _head_order(attention.heads, both).view(attention.heads, 2, -1).unbind(1)
    return torch.cat([gates.flatten(), queries.flatten()])


def delta_tensors(delta: DeltaNet) -> dict[str, Destination]:
    return {
        "linear_attn.in_proj_qkv.weight": delta.projection.joint_part(0, 3),  # queries, keys and values
        "linear_attn.in_proj_z.weight": delta.projection.part(3),
        "linear_attn.in_proj_b.weight": delta.projection.part(4),
        "linear_attn.in_proj_a.weight": delta.projection.part(5),
        "linear_attn.conv1d.weight": delta.conv_part(),
        "linear_attn.A_log": delta.head_part(delta.a_log),
        "linear_attn.dt_bias": delta.head_part(delta.dt_bias),
        "linear_attn.norm.weight": delta.value_norm,
        "linear_attn.out_proj.weight": delta.output.part(0),
    }


def dense_tensors(mlp: GatedMLP) -> dict[str, Destination]:
    return {
        "mlp.gate_proj.weight": mlp.gate_up.part(0),
        "mlp.up_proj.weight": mlp.gate_up.part(1),
        "mlp.down_proj.weight": mlp.down.part(0),
    }


def expert_tensors(mlp: RoutedMLP) -> dict[str, Destination]:
    table: dict[str, Destination] = {"mlp.gate.weight": mlp.router[: mlp.experts]}
    names = [f"mlp.experts.{expert}" for expert in range(mlp.experts)]
    if mlp.shared:
        table["mlp.shared_expert_gate.weight"] = mlp.router[mlp.experts :]
        names.append("mlp.shared_expert")
    for expert, name in enumerate(names):
        table |= {
            f"{name}.gate_proj.weight": mlp.gate_part(expert),
            f"{name}.up_proj.weight": mlp.up_part(expert),
            f"{name}.down_proj.weight": mlp.down_part(expert),
        }
    return table


def fused_expert_tensors(mlp: RoutedMLP) -> dict[str, FusedTensor]:
    names = [name for name in expert_tensors(mlp) if ".experts." in name]
    down = tuple(name for name in names if "down_proj" in name)
    gate_up = tuple(name for name in names if "down_proj" not in name)
    return {
        "mlp.experts.gate_up_proj": FusedTensor(mlp.gate_up_of_all(), gate_up),
        "mlp.experts.down_proj": FusedTensor(mlp.down_of_all(), down),
    }
