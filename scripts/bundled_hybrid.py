"""The hybrid network for training: packed rows through Gated DeltaNet, and all experts in a few GEMMs.

transformers computes sequences and experts one by one, which is slow. These forwards compute the same
(tests/measure/problems/test_packed_training.py), and the evaluation uses transformers only.
"""

from __future__ import annotations

from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad, silu, softplus
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeExperts,
    Qwen3_5MoeGatedDeltaNet,
    Qwen3_5MoeTopKRouter,
    l2norm,
    load_balancing_loss_func,
)

_CHUNK = 64


class Chunks(NamedTuple):
    """Chunks of 64 tokens of packed sequences: first the first chunks of all sequences, then the second ones, ...

    Sequences are sorted by decreasing length, so that those with an n-th chunk come first.
    indices: [T] the position of each token; counts: how many sequences have a first chunk, a second, ...
    """

    indices: torch.Tensor
    counts: list[int]

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Chunks:
        sizes = np.array(lengths)
        ranks = np.empty(len(sizes), dtype=np.int64)
        ranks[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
        chunks = -(-sizes // _CHUNK)
        counts = [int((chunks > step).sum()) for step in range(chunks.max())]
        first_gpus = np.cumsum([0, *counts[:-1]])
        within = np.arange(sizes.sum()) - np.repeat(sizes.cumsum() - sizes, sizes)
        indices = (first_gpus[within // _CHUNK] + np.repeat(ranks, sizes)) * _CHUNK + within % _CHUNK
        return cls(torch.from_numpy(indices).to(device, non_blocking=True), counts)


def make_trainable(model: torch.nn.Module) -> None:
    """Replace the forwards of the slow layers."""
    for module in model.modules():
        if isinstance(module, Qwen3_5MoeGatedDeltaNet):
            module.forward = MethodType(_packed_delta_net, module)
        elif isinstance(module, Qwen3_5MoeExperts):
            module.forward = MethodType(_all_experts, module)


class RouterLogits:
    """The router logits of the last forward, for the load-balancing loss."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._seen: list[torch.Tensor] = []
        for module in model.modules():
            if isinstance(module, Qwen3_5MoeTopKRouter):
                module.register_forward_hook(lambda _module, _given, found: self._seen.append(found[0]))

    def take_loss(self, experts: int, choices: int) -> torch.Tensor:
        logits, self._seen = tuple(self._seen), []
        return load_balancing_loss_func(logits, experts, choices)


def _packed_delta_net(
    module: Qwen3_5MoeGatedDeltaNet, hidden_states: torch.Tensor, chunks: Chunks, own_positions: torch.Tensor, **_: Any
) -> torch.Tensor:
    """hidden_states: [1, T, hidden_size]; own_positions: [T], of each token in its sequence."""
    hidden = hidden_states[0]
    mixed = silu(_convolve(module.in_proj_qkv(hidden), module.conv1d.weight[:, 0], own_positions))
    query, key, value = mixed.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
    shared = module.num_v_heads // module.num_k_heads
    query, key = (
        l2norm(each.float().unflatten(-1, (module.num_k_heads, -1))).repeat_interleave(shared, dim=1)
        for each in (query, key)
    )
    value = value.float().unflatten(-1, (module.num_v_heads, -1))
    beta = module.in_proj_b(hidden).float().sigmoid()
    decay = -module.A_log.exp() * softplus(module.in_proj_a(hidden).float() + module.dt_bias)
    with torch.autocast(hidden.device.type, enabled=False):
        out = _delta_rule(query * query.shape[-1] ** -0.5, key, value, decay, beta, chunks)
    gate = module.in_proj_z(hidden).unflatten(-1, (module.num_v_heads, -1))
    return module.out_proj(module.norm(out.flatten(0, 1).to(gate.dtype), gate.flatten(0, 1)).view(len(hidden), -1))[
        None
    ]


def _convolve(mixed: torch.Tensor, taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Causal convolution of each channel within its sequence. mixed: [T, channels]; taps: [channels, kernel]."""
    total = mixed * taps[:, -1]
    for back in range(1, taps.shape[1]):
        earlier = pad(mixed, (0, 0, back, 0))[: len(mixed)]
        total = total + torch.where(positions[:, None] >= back, earlier, 0) * taps[:, -1 - back]
    return total


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
    chunks: Chunks,
) -> torch.Tensor:
    """The gated delta rule in chunks (Yang et al. 2024, arXiv:2412.06464).

    All tensors are [T, heads, ...] float32, as is the result.
    """
    total = sum(chunks.counts)

    def in_chunks(values: torch.Tensor) -> torch.Tensor:
        """[T, heads, ...] -> [chunks, heads, 64, ...], zeros past the end of a sequence."""
        laid = values.new_zeros(total * _CHUNK, *values.shape[1:]).index_copy(0, chunks.indices, values)
        return laid.unflatten(0, (total, _CHUNK)).transpose(1, 2)

    query, key, value, decay, beta = map(in_chunks, (query, key, value, decay, beta))
    so_far = decay.cumsum(-1)
    later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (so_far[..., :, None] - so_far[..., None, :]).masked_fill(later, float("-inf")).exp()
    keys = key * beta[..., None]
    system = (keys @ key.mT) * between
    inside = (query @ key.mT) * between
    both = torch.cat([value * beta[..., None], keys * so_far.exp()[..., None]], -1)
    values, reads = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(
        [value.shape[-1], key.shape[-1]], dim=-1
    )
    query = query * so_far.exp()[..., None]
    key = key * (so_far[..., -1:] - so_far).exp()[..., None]
    kept = so_far[..., -1].exp()[..., None, None]
    state = query.new_zeros(chunks.counts[0], query.shape[1], key.shape[-1], value.shape[-1])
    results, first = [], 0
    for count in chunks.counts:
        own, state = slice(first, first + count), state[:count]
        change = values[own] - reads[own] @ state
        results.append(query[own] @ state + inside[own] @ change)
        state = state * kept[own] + key[own].mT @ change
        first += count
    return torch.cat(results).transpose(1, 2).flatten(0, 1)[chunks.indices]


def _all_experts(
    module: Qwen3_5MoeExperts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run every token through every expert, with weight zero where it is not routed: for few, small experts."""
    shares = weights.new_zeros(len(hidden), module.num_experts).scatter(1, chosen, weights)
    gate, up = torch.einsum("th,ewh->etw", hidden, module.gate_up_proj).chunk(2, dim=-1)
    outputs = torch.einsum("etw,ehw->eth", silu(gate) * up, module.down_proj)
    return (outputs * shares.t()[..., None].to(outputs.dtype)).sum(0)
