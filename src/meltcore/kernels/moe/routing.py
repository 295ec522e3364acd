"""Selects the top_k experts of each token and their weights (Shazeer et al. 2017, arXiv:1701.06538).

A pair is one token with one of its experts. The k-th expert of a token is pair number token * top_k + k.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton
from meltcore.kernels.norm import Norm

_MASKED_KEY = tl.constexpr(-(2**63)) if tl else None  # below the keys of all experts that can still be selected


class Routing(NamedTuple):
    """The selected experts of each token and their weights.

    topk_ids: [tokens, top_k] int32, by descending probability; topk_weights: [tokens, top_k] float32.
    """

    topk_ids: torch.Tensor
    topk_weights: torch.Tensor

    @property
    def pairs(self) -> int:
        """Number of pairs."""
        return self.topk_ids.numel()


class RouterLogits(NamedTuple):
    """The logits of one token, for kernels that select its experts themselves, as `select_experts` does.

    `values` is [1, experts + shared_expert], contiguous, of a 16-bit type. The kernels apply `norm` to the token first;
    it is None for a normalized token.
    """

    values: torch.Tensor
    norm: Norm | None
    top_k: int
    norm_topk_prob: bool
    shared_expert: bool

    @property
    def pairs(self) -> int:
        """Number of the token's experts."""
        return self.top_k + self.shared_expert


def sort_by_expert(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort pairs by expert: the reference of moe/align.py, without tiles.

    topk_ids: [tokens, top_k] int32. Returns pairs [tokens * top_k] int32, ascending per expert, and offsets [experts +
    1] int32: expert e has pairs[offsets[e] : offsets[e + 1]].
    """
    ordered_bits, pairs = topk_ids.flatten().sort(stable=True)
    offsets = torch.searchsorted(ordered_bits, torch.arange(num_experts + 1, dtype=torch.int32, device=topk_ids.device))
    return pairs.int(), offsets.int()


def select_experts_reference(
    logits: torch.Tensor,
    top_k: int,
    *,
    norm_topk_prob: bool,
    shared_expert: bool = False,
    uniform_seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Routing:
    """Compute `select_experts` in PyTorch, as its specification."""
    if logits.dim() == 3:
        logits = logits.sum(0).to(dtype)
    router_logits, gate_logits = logits.float().tensor_split([logits.shape[1] - shared_expert], dim=1)
    if uniform_seed is not None:
        # In float32: 16-bit types have few values, so ties, of which the lower id is taken, would be common.
        router_logits = torch.rand_like(router_logits)
    topk_ids = router_logits.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    topk_weights = router_logits.softmax(-1).gather(1, topk_ids)
    if norm_topk_prob:
        topk_weights = topk_weights / topk_weights.sum(-1, keepdim=True)
    if shared_expert:
        topk_ids = torch.cat([topk_ids, torch.full_like(topk_ids[:, :1], router_logits.shape[1])], 1)
        topk_weights = torch.cat([topk_weights, gate_logits.sigmoid()], 1)
    return Routing(topk_ids.int(), topk_weights)


@triton.jit
def _sort_key(logits, expert, BLOCK: tl.constexpr):
    """Return int64 keys in the order of selection, different for all experts: by larger logit, then by lower id."""
    bits = tl.where(logits == 0, 0.0, logits).to(tl.int32, bitcast=True)  # minus zero equals zero
    ordered_bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered_bits.to(tl.int64) << 32) | (BLOCK - 1 - expert)


@triton.jit
def _logit_of_key(key):
    ordered_bits = (key >> 32).to(tl.int32)
    return (ordered_bits ^ ((ordered_bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _mix_bits(bits):
    """Apply the finalizer of MurmurHash3 (Appleby) to uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _uniform_logits(counters_ptr, seed, token, expert, BLOCK: tl.constexpr):
    """Return random logits of one token, uniform in [0, 1), from a counter that every call increments."""
    counter = tl.load(counters_ptr + token)
    tl.store(counters_ptr + token, counter + 1)
    call = _mix_bits(_mix_bits(seed.to(tl.uint32)) + counter.to(tl.uint32))
    bits = _mix_bits(call ^ _mix_bits((token * BLOCK + expert).to(tl.uint32)))
    return (bits >> 9).to(tl.int32).to(tl.float32) * (1.0 / (1 << 23))


@triton.jit(do_not_specialize=["row_stride", "split_stride", "seed"])
def _select_experts_kernel(
    logits_ptr,
    counters_ptr,
    topk_ids_ptr,
    topk_weights_ptr,
    row_stride,
    split_stride,
    seed,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    TOP_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NORM_TOPK_PROB: tl.constexpr,
    UNIFORM: tl.constexpr,
    TYPE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program selects the experts of one token. It has one warp, so that no data is exchanged between warps.

    EXPERTS: number of experts without the shared expert; SHARED: 0 or 1.
    """
    pdl_sync(PDL)
    token = tl.program_id(0)
    expert = tl.arange(0, EXPERT_BLOCK)
    row_ptr = logits_ptr + token.to(tl.int64) * row_stride
    logits = tl.load(row_ptr + expert, mask=expert < EXPERTS, other=0.0).to(tl.float32)
    gate = tl.load(row_ptr + EXPERTS * SHARED).to(tl.float32)
    for _ in tl.static_range(1, SPLIT_K):
        row_ptr += split_stride
        logits += tl.load(row_ptr + expert, mask=expert < EXPERTS, other=0.0)
        gate += tl.load(row_ptr + EXPERTS * SHARED)
    logits, gate = logits.to(TYPE).to(tl.float32), gate.to(TYPE).to(tl.float32)
    if UNIFORM:
        logits = _uniform_logits(counters_ptr, seed, token, expert, EXPERT_BLOCK)
    keys = tl.where(expert < EXPERTS, _sort_key(logits, expert, EXPERT_BLOCK), _MASKED_KEY)
    max_logit = _logit_of_key(tl.max(keys, axis=0))
    slot = tl.arange(0, TOP_K_BLOCK)
    topk_ids = tl.zeros((TOP_K_BLOCK,), dtype=tl.int32)
    topk_weights = tl.zeros((TOP_K_BLOCK,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        best_key = tl.max(keys, axis=0)
        topk_ids = tl.where(slot == k, EXPERT_BLOCK - 1 - (best_key & (EXPERT_BLOCK - 1)).to(tl.int32), topk_ids)
        topk_weights = tl.where(slot == k, tl.exp(_logit_of_key(best_key) - max_logit), topk_weights)
        keys = tl.where(keys == best_key, _MASKED_KEY, keys)
    if NORM_TOPK_PROB:
        total = tl.sum(topk_weights, axis=0)
    else:
        total = tl.sum(tl.where(expert < EXPERTS, tl.exp(logits - max_logit), 0.0), axis=0)
    topk_weights = topk_weights / total
    if SHARED:
        topk_ids = tl.where(slot == TOP_K, EXPERTS, topk_ids)
        topk_weights = tl.where(slot == TOP_K, 1.0 / (1.0 + tl.exp(-gate)), topk_weights)
    output_offset = token.to(tl.int64) * (TOP_K + SHARED) + slot
    tl.store(topk_ids_ptr + output_offset, topk_ids, mask=slot < TOP_K + SHARED)
    tl.store(topk_weights_ptr + output_offset, topk_weights, mask=slot < TOP_K + SHARED)


@triton.jit
def pairs_of_expert(expert, topk_ids_ptr, tokens, TOKENS: tl.constexpr, TOP_K: tl.constexpr):
    """Return, for up to TOKENS tokens, whether each selected the expert (0 or 1), and the number of that pair."""
    token = tl.arange(0, TOKENS)[:, None]
    k = tl.arange(0, triton.next_power_of_2(TOP_K))[None, :]
    pair = token * TOP_K + k
    is_selected = tl.load(topk_ids_ptr + pair, mask=(token < tokens) & (k < TOP_K), other=-1) == expert
    return tl.max(is_selected.to(tl.int32), axis=1), tl.sum(tl.where(is_selected, pair, 0), axis=1)


def select_experts(
    logits: torch.Tensor,
    top_k: int,
    *,
    norm_topk_prob: bool,
    shared_expert: bool = False,
    uniform_seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Routing:
    """Select the top_k experts of each token by softmax. Of equal logits the lower expert id is selected.

    Args:
        logits: [tokens, experts] of any floating type, rows may be strided; or partial sums [splits, tokens, experts]
            float32, which are summed and rounded to `dtype`.
        top_k: number of experts per token.
        norm_topk_prob: whether the weights of a token's experts add up to 1. Otherwise they are the experts'
            probabilities.
        shared_expert: whether the last column belongs to an expert that is not selected by rank. It is appended to the
            experts of every token, weighted by the sigmoid of its logit.
        uniform_seed: draws experts uniformly at random, differently in every call. It is for benchmarks on dummy
            weights, whose tokens are all alike.
        dtype: the type to which sums of partial sums are rounded.
    """
    if not use_triton(logits):
        return select_experts_reference(
            logits,
            top_k,
            norm_topk_prob=norm_topk_prob,
            shared_expert=shared_expert,
            uniform_seed=uniform_seed,
            dtype=dtype,
        )
    (tokens, columns), device = logits.shape[-2:], logits.device
    num_experts = columns - shared_expert
    topk_ids = torch.empty(tokens, top_k + shared_expert, dtype=torch.int32, device=device)
    topk_weights = torch.empty(topk_ids.shape, dtype=torch.float32, device=device)
    if tokens:
        _select_experts_kernel[(tokens,)](
            logits,
            topk_ids if uniform_seed is None else _call_counters(device, triton.next_power_of_2(tokens)),
            topk_ids,
            topk_weights,
            logits.stride(-2),
            logits.stride(0) if logits.dim() == 3 else 0,
            uniform_seed or 0,
            EXPERTS=num_experts,
            SHARED=int(shared_expert),
            TOP_K=top_k,
            SPLIT_K=logits.shape[0] if logits.dim() == 3 else 1,
            EXPERT_BLOCK=triton.next_power_of_2(num_experts),
            TOP_K_BLOCK=triton.next_power_of_2(top_k + shared_expert),
            NORM_TOPK_PROB=norm_topk_prob,
            UNIFORM=uniform_seed is not None,
            TYPE=getattr(tl, str(dtype or logits.dtype).removeprefix("torch.")),
            num_warps=1,
            **pdl_options(device),
        )
    return Routing(topk_ids, topk_weights)


@cache
def _call_counters(device: torch.device, tokens: int) -> torch.Tensor:
    """Return a counter of random draws per token of a step. Captured graphs keep the address of the counters."""
    return torch.zeros(tokens, dtype=torch.int32, device=device)
