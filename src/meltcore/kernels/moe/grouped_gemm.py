"""Grouped GEMM in Triton multiplies each pair of a token and an expert by that expert's weight.

A program takes rows of an expert's weight and a tile of the expert's pairs. How a program finds its pairs depends on
the number of tokens:

For very few tokens, each pair is a tile ("gemv"). For more tokens, each pair still has a program. The program scans all
pairs for pairs of the same expert, and exits unless its own pair is the first of a tile ("indirect"). Many pairs are
aligned first (moe/align.py), which takes one or three more launches ("grouped").

Only the device knows which experts have pairs. So the grid has as many programs as could be needed, and programs
without pairs exit immediately. The host never waits, and a CUDA graph can capture the launch. The sum of a pair depends
neither on the order in which programs run nor on the other pairs.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch

from meltcore.kernels.capability import capability, shared_memory_bytes
from meltcore.kernels.gemm.split_k import GemmConfig, silu_and_mul
from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync
from meltcore.kernels.moe.align import Alignment, moe_align_block_size
from meltcore.kernels.moe.routing import pairs_of_expert
from meltcore.kernels.moe.tuned_configs import TABLE

Mode = Literal["gemv", "indirect", "grouped"]
# Up to how many tokens the mode is "gemv", the second where down_proj of an expert has at most that many bytes; and
# "indirect".
_GEMV_TOKENS, _GEMV_TOKENS_SMALL, _SMALL_EXPERT = 2, 8, 2**19
INDIRECT_TOKENS = 16
_MAX_STAGES = 4
_MAX_DISSIMILARITY = 2.0  # ratio of rows or columns up to which another shape's configurations are used
_TUNED_CAPABILITY = 90  # that the table of configurations is for


@triton.jit
def _load_columns(rows_ptr, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Load BLOCK_K columns of some rows from `start` on, with zeros past the end."""
    column = start + tl.arange(0, BLOCK_K)[None, :]
    if K % BLOCK_K == 0:
        return tl.load(rows_ptr + column)
    return tl.load(rows_ptr + column, mask=column < K, other=0.0)


@triton.jit
def find_tile(topk_ids_ptr, tokens, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, MAX_TOKENS: tl.constexpr):
    """Return the expert of this program's pair, and the tile of that expert's pairs.

    Returns (expert, pairs of the tile, mask of pairs to store, whether the tile has pairs). Past the end of the
    expert's pairs the last pair repeats. The tile has no pairs unless the program's pair is the first of a tile.
    """
    pair_index = tl.program_id(1)
    expert = tl.load(topk_ids_ptr + pair_index)
    has_expert, pairs = pairs_of_expert(expert, topk_ids_ptr, tokens, MAX_TOKENS, TOP_K)
    num_before = tl.sum(tl.where(tl.arange(0, MAX_TOKENS) < pair_index // TOP_K, has_expert, 0), axis=0)
    end = tl.sum(has_expert, axis=0)
    if num_before % BLOCK_M != 0:
        end = num_before
    slot = num_before + tl.arange(0, BLOCK_M)
    is_slot = (tl.cumsum(has_expert, axis=0) - 1)[None, :] == tl.minimum(slot, end - 1)[:, None]
    pair = tl.sum(tl.where(is_slot & (has_expert > 0)[None, :], pairs[None, :], 0), axis=1)
    return expert, pair, slot < end, num_before < end


@triton.jit
def pairs_of_program(
    topk_ids_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    tokens,
    TOP_K: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MODE: tl.constexpr,
):
    """Return the expert and the tile of pairs of this program (its second index), for kernels of quantized weights.

    Returns (expert, pairs of the tile, mask of pairs, whether there are any). Pairs past the end are not valid numbers.
    """
    slot = tl.arange(0, BLOCK_M)
    if MODE == "gemv":
        pair = tl.program_id(1) + slot * 0
        expert = tl.load(topk_ids_ptr + tl.program_id(1))
        valid = slot == 0
        has_pairs = expert >= 0
    elif MODE == "indirect":
        expert, pair, valid, has_pairs = find_tile(topk_ids_ptr, tokens, TOP_K, BLOCK_M, MAX_TOKENS)
    else:
        tile = tl.program_id(1)
        num_valid = tl.load(num_valid_ptr + tile)
        expert = tl.load(expert_ids_ptr + tile)
        pair = tl.load(sorted_token_ids_ptr + tile * BLOCK_M + slot)  # all loads are in flight together
        valid = slot < num_valid
        has_pairs = num_valid > 0
    return expert, pair, valid, has_pairs


@triton.jit(do_not_specialize=["tokens"])
def _moe_grouped_gemm_kernel(
    input_ptr,
    weight_ptr,
    output_ptr,
    topk_ids_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    MAX_TOKENS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    MODE: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program multiplies BLOCK_N rows of an expert's weight by up to BLOCK_M of the expert's pairs.

    GATED: inputs are tokens, and gate and up rows alternate. Otherwise inputs are pairs. Pairs and rows past the end
    repeat a valid one and are not stored.
    """
    pdl_sync(PDL)
    slot = tl.arange(0, BLOCK_M)
    if MODE == "gemv":
        pair = tl.program_id(1) + slot * 0
        expert = tl.load(topk_ids_ptr + tl.program_id(1))
        valid = slot == 0
    elif MODE == "indirect":
        expert, pair, valid, any_valid = find_tile(topk_ids_ptr, tokens, TOP_K, BLOCK_M, MAX_TOKENS)
        if not any_valid:
            return
    else:
        tile = tl.program_id(1)
        num_valid = tl.load(num_valid_ptr + tile)
        expert = tl.load(expert_ids_ptr + tile)
        first = tl.load(sorted_token_ids_ptr + tile * BLOCK_M)
        pair = tl.load(sorted_token_ids_ptr + tile * BLOCK_M + slot)  # all loads are in flight together
        if num_valid == 0:
            return
        valid = slot < num_valid
        pair = tl.where(valid, pair, first)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    if GATED:
        weight_rows = tl.minimum(row // 2, N - 1) + row % 2 * N
        source_row = pair // TOP_K
    else:
        weight_rows = tl.minimum(row, N - 1)
        source_row = pair
    input_row_ptrs = input_ptr + source_row.to(tl.int64)[:, None] * K
    weight_row_ptrs = weight_ptr + (expert.to(tl.int64) * (2 * N if GATED else N) + weight_rows)[:, None] * K
    # Tensor cores need the longer side first: at least 64 rows on Hopper.
    acc = tl.zeros((BLOCK_N, BLOCK_M) if BLOCK_N > BLOCK_M else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=NUM_STAGES):
        weight = _load_columns(weight_row_ptrs, start, K, BLOCK_K)
        inputs = _load_columns(input_row_ptrs, start, K, BLOCK_K)
        if BLOCK_N > BLOCK_M:
            acc = tl.dot(weight, tl.trans(inputs), acc, input_precision="ieee")
        else:
            acc = tl.dot(inputs, tl.trans(weight), acc, input_precision="ieee")
    if BLOCK_N > BLOCK_M:
        acc = tl.trans(acc)
    if GATED:
        acc = silu_and_mul(acc)
    column = tl.program_id(0) * (BLOCK_N // 2 if GATED else BLOCK_N)
    column = column + tl.arange(0, BLOCK_N // 2 if GATED else BLOCK_N)[None, :]
    output_ptrs = output_ptr + pair.to(tl.int64)[:, None] * N + column
    tl.store(output_ptrs, acc, mask=valid[:, None] & (column < N))


def select_config(pairs: int, weight: torch.Tensor) -> GemmConfig:
    """Select the configuration for a number of pairs of all experts together and a weight [experts, rows, columns].

    On the GPU of the table, this is the tuned configuration of the most similar shape at the same number of pairs per
    expert. On other GPUs it is `default_config`.
    """
    tuned_configs = _tuned_configs(tuple(weight.shape)) if capability(weight.device) == _TUNED_CAPABILITY else ()
    if tuned_configs and weight.element_size() == 2:
        return next((config for max_pairs, config in tuned_configs if pairs <= max_pairs), tuned_configs[-1][1])
    return default_config(pairs, weight.shape[0], weight.element_size(), shared_memory_bytes(weight.device))


def default_config(pairs: int, num_experts: int, element_bytes: int, shared_bytes: int) -> GemmConfig:
    """Select a configuration by size. All experts together have `pairs` pairs; a program has `shared_bytes` of memory.

    A tile has space for about twice the mean number of pairs per expert, up to 128, because a second tile would read
    the weight again. Only a few sizes are possible, since the kernel is compiled for each. Float32 does not use tensor
    cores and has the smallest tile.
    """
    mean_pairs = pairs / num_experts
    block_m = 16 if mean_pairs <= 8 or element_bytes > 2 else 64 if mean_pairs <= 32 else 128
    block_n = 64 if block_m == 16 else 128
    block_k = (256 if block_m == 16 else 128) // element_bytes
    stage_bytes = (block_m + block_n) * block_k * element_bytes
    stages = max(2, min(_MAX_STAGES, shared_bytes // stage_bytes))
    return GemmConfig(block_m, block_n, block_k, stages, 8 if block_m == 128 else 4)


def select_configs(pairs: int, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[GemmConfig, GemmConfig]:
    """Select the configurations of both GEMMs. They have the same block_m, since pairs are aligned once."""
    up_config, down_config = select_config(pairs, gate_up), select_config(pairs, down)
    if down_config.block_m == up_config.block_m:
        return up_config, down_config
    matching_configs = [
        config for _, config in _tuned_configs(tuple(down.shape)) if config.block_m == up_config.block_m
    ]
    if matching_configs:
        return up_config, matching_configs[-1]
    default = default_config(pairs, len(down), down.element_size(), shared_memory_bytes(down.device))
    return default, default


@cache
def _tuned_configs(shape: tuple[int, ...]) -> tuple[tuple[int, GemmConfig], ...]:
    """Return the table's rows for the most similar weight shape at the same number of pairs per expert.

    Returns no rows if the rows or columns of every shape differ by more than a factor of two.
    """

    def size_ratios(other_shape: tuple[int, ...]) -> list[float]:
        return [max(pair) / min(pair) for pair in zip(shape[1:], other_shape[1:], strict=True)]

    nearest_shape = shape if shape in TABLE else min(TABLE, key=lambda other_shape: math.prod(size_ratios(other_shape)))
    if max(size_ratios(nearest_shape)) > _MAX_DISSIMILARITY:
        return ()
    return tuple(
        (max_pairs * shape[0] // nearest_shape[0], GemmConfig(*config)) for max_pairs, config in TABLE[nearest_shape]
    )


class Dispatch(NamedTuple):
    """The pairs of a step, the mode in which programs find pairs, and in mode "grouped" the pairs' alignment.

    topk_ids: [tokens, top_k] int32.
    """

    topk_ids: torch.Tensor
    mode: Mode
    alignment: Alignment | None

    @classmethod
    def of(cls, topk_ids: torch.Tensor, down: torch.Tensor, block_m: int, mode: Mode | None = None) -> Dispatch:
        """Select the mode for a step, and align its pairs if needed.

        down: [experts, hidden_size, width].
        """
        mode = mode or select_mode(len(topk_ids), down)
        return cls(topk_ids, mode, moe_align_block_size(topk_ids, block_m, len(down)) if mode == "grouped" else None)

    @property
    def tiles(self) -> int:
        """Return an upper bound of the tiles of pairs, which is the number of programs per tile of an expert's rows."""
        return self.topk_ids.numel() if self.alignment is None else len(self.alignment.expert_ids)

    @property
    def arguments(self) -> tuple[torch.Tensor | int, ...]:
        """The arguments of a launch: expert ids of tokens, the alignment (unused without one), and the token count."""
        alignment = (self.topk_ids,) * 3 if self.alignment is None else self.alignment[1:4]
        return (self.topk_ids, *alignment, len(self.topk_ids))

    @property
    def constants(self) -> dict[str, int | str]:
        """The constants of a launch, by which its programs find their pairs."""
        # One size serves all tokens of the mode unless a test forces it for more: each is compiled.
        tokens = max(len(self.topk_ids), INDIRECT_TOKENS) if self.mode == "indirect" else INDIRECT_TOKENS
        return {"TOP_K": self.topk_ids.shape[1], "MAX_TOKENS": triton.next_power_of_2(tokens), "MODE": self.mode}


def select_mode(num_tokens: int, down: torch.Tensor) -> Mode:
    """Return the fastest mode, as measured on an H200 for Qwen3.5's sizes.

    "gemv" reads an expert's weight once per pair. It is fast while tokens hardly share experts, or if the L2 cache
    holds the experts. It is as fast as "grouped" for 3 tokens at width 512, and for 8 tokens at width 64. "indirect" is
    faster while there are hardly more pairs than tiles. "grouped" is as fast at 16 tokens, up to 9 % faster at 32
    tokens of width 64, and 1 % slower at 16 to 32 tokens of width 768 (2026-11-22).
    """
    if num_tokens <= (_GEMV_TOKENS_SMALL if down[0].nbytes <= _SMALL_EXPERT else _GEMV_TOKENS):
        return "gemv"
    return "indirect" if num_tokens <= INDIRECT_TOKENS else "grouped"


def grouped_gemm(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    dispatch: Dispatch,
    *,
    config: GemmConfig,
    gated: bool,
) -> None:
    """Multiply each pair by its expert's weight and write the result to `output`.

    With `gated`, the GEMM goes from tokens to pairs: inputs [tokens, K], output [tokens * top_k, N]. The weight
    [experts, 2 * N, K] holds gate rows above up rows, and the result is silu(gate) * up. Otherwise the GEMM goes from
    pairs to pairs, with weight [experts, N, K]. `config.block_m` must equal the block size of the alignment.
    """
    rows, k = weight.shape[1:]
    _moe_grouped_gemm_kernel[(triton.cdiv(rows, config.block_n), dispatch.tiles)](
        inputs,
        weight,
        output,
        *dispatch.arguments,
        N=output.shape[1],
        K=k,
        GATED=gated,
        **dispatch.constants,
        **config.constants,
        **pdl_options(weight.device),
    )
