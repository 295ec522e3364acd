"""Products of many pairs with their experts' weights, loaded by the tensor memory accelerator of Hopper GPUs.

Where an expert has some dozens of pairs and more, reading its weight no longer takes the time, and what counts is how
fast tiles reach the tensor cores. So tokens are copied to where their pairs stand (expert_places.py), and a program for
each processor goes through tiles in a loop: the next tile's first loads are under way while this one is stored.

On an H200, 8,064 tokens of Qwen3-30B-A3B: 610 and 350 us for the two products and 80 for the copy, against 780 and 430
with pairs looked up by the product itself (expert_product.py). Tiles run at 730 TFLOP/s, nine tenths of them filled.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from functools import partial

import torch

from meltcore.kernels.capability import capability, processors
from meltcore.kernels.expert_places import Places, most_tiles, place_pairs
from meltcore.kernels.jit import CompileCase, ModelShape, TensorDescriptor, tl, triton
from meltcore.kernels.overlap import overlaps

TILE = 128  # pairs
_HOPPER = 90  # the compute capability at which this is the faster way
# Pairs an expert from which on it is, by the least width: below, tiles are less than half full, and narrow experts,
# what a rank has of some, save less than the copy costs (H200, Qwen3.5's: even at 128 pairs of width 256 and 128, a
# quarter slower at 250 of width 64).
_LEAST_PAIRS = {512: 64, 128: 128}
_COLUMNS, _STAGES, _WARPS = 64, 3, 8  # of a step of the loop; measured on an H200


@triton.jit
def _copy_tokens_kernel(
    hidden_ptr,
    copies_ptr,
    rows_ptr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one token, to the row of each of its pairs."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < SIZE
    hidden = tl.load(hidden_ptr + token * SIZE + column, mask=inside)
    for choice in tl.static_range(CHOICES):
        row = tl.load(rows_ptr + token * CHOICES + choice).to(tl.int64)
        tl.store(copies_ptr + row * SIZE + column, hidden, mask=inside)


@triton.jit
def _gated_tiles_kernel(
    copies,
    weight,
    activated,
    owners_ptr,
    used_ptr,
    PIECES: tl.constexpr,
    INPUT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: tiles in turn, each of PAIRS pairs and ROWS rows of the gate and as many of what it gates."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    works = tl.load(used_ptr) * PIECES
    for work in tl.range(tl.program_id(0), works, tl.num_programs(0), flatten=True):
        tile, piece = work // PIECES, work % PIECES
        expert = tl.load(owners_ptr + tile)
        totals = tl.zeros((PAIRS, 2 * ROWS), dtype=tl.float32)
        for start in tl.range(0, INPUT, COLUMNS, num_stages=STAGES):
            inputs = copies.load([tile * PAIRS, start])
            rows = weight.load([expert, 0, piece * ROWS, start]).reshape(2 * ROWS, COLUMNS)
            totals = tl.dot(inputs, rows.T, totals)
        gate, up = tl.split(tl.permute(tl.reshape(totals, (PAIRS, 2, ROWS)), (0, 2, 1)))
        gated = gate / (1.0 + tl.exp(-gate)) * up
        activated.store([tile * PAIRS, piece * ROWS], gated.to(activated.dtype))


@triton.jit
def _down_tiles_kernel(
    activated,
    weight,
    outputs_ptr,
    pairs_ptr,
    owners_ptr,
    filled_ptr,
    used_ptr,
    PIECES: tl.constexpr,
    INPUT: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: tiles in turn, each of PAIRS pairs and ROWS rows of the way down, stored in the order of pairs."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    works = tl.load(used_ptr) * PIECES
    slot, row = tl.arange(0, PAIRS), tl.arange(0, ROWS)[None, :]
    for work in tl.range(tl.program_id(0), works, tl.num_programs(0), flatten=True):
        tile, piece = work // PIECES, work % PIECES
        expert = tl.load(owners_ptr + tile)
        totals = tl.zeros((PAIRS, ROWS), dtype=tl.float32)
        for start in tl.range(0, INPUT, COLUMNS, num_stages=STAGES):
            inputs = activated.load([tile * PAIRS, start])
            rows = weight.load([(expert * PIECES + piece) * ROWS, start])
            totals = tl.dot(inputs, rows.T, totals)
        pair = tl.load(pairs_ptr + tile * PAIRS + slot).to(tl.int64)
        outputs = outputs_ptr + pair[:, None] * (PIECES * ROWS) + piece * ROWS + row
        tl.store(outputs, totals, mask=(slot < tl.load(filled_ptr + tile))[:, None])


def suits_tiles(hidden: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether `tiles_of_experts` takes these, and is the faster way. Shapes as in `expert_outputs`."""
    size, width = down.shape[1:]
    fits = size % TILE == 0 and _rows(width) >= _COLUMNS
    least = next((pairs for narrowest, pairs in _LEAST_PAIRS.items() if width >= narrowest), math.inf)
    return (
        experts.numel() >= least * len(gate_up)
        and fits
        and hidden.element_size() == 2
        and capability(hidden.device) == _HOPPER
    )


def _rows(width: int) -> int:
    """Of a tile of the gate: the largest power of two up to TILE that divides the width."""
    return min(TILE, width & -width)


def tiles_of_experts(
    hidden: torch.Tensor, experts: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """[tokens * choices, hidden_size]: down (silu(gate x) * up x) of each pair. Arguments as in `expert_outputs`."""
    count, size, width = down.shape
    places = place_pairs(experts, count, TILE)
    rows = most_tiles(experts.numel(), count, TILE) * TILE
    copies, activated = hidden.new_empty(rows, size), hidden.new_empty(rows, width)
    _copy_tokens(hidden, copies, places)
    _gated_tiles(copies, gate_up, activated, places)
    del copies  # its memory serves for what follows: kernels on one stream run in order
    outputs = hidden.new_empty(experts.numel(), size)
    _down_tiles(activated, down, outputs, places)
    return outputs


def _copy_tokens(hidden: torch.Tensor, copies: torch.Tensor, places: Places) -> None:
    (tokens, size), overlap = hidden.shape, overlaps(hidden.device)
    _copy_tokens_kernel[(tokens,)](
        hidden,
        copies,
        places.rows,
        SIZE=size,
        CHOICES=places.rows.shape[1],
        BLOCK=triton.next_power_of_2(size),
        OVERLAP=overlap,
        num_warps=8,
        **({"launch_pdl": True} if overlap else {}),
    )


def _gated_tiles(copies: torch.Tensor, gate_up: torch.Tensor, activated: torch.Tensor, places: Places) -> None:
    (count, both, size), width = gate_up.shape, activated.shape[1]
    rows, overlap = _rows(width), overlaps(copies.device)
    halves = gate_up.view(count, 2, both // 2, size)
    _gated_tiles_kernel[(processors(copies.device),)](
        TensorDescriptor.from_tensor(copies, [TILE, _COLUMNS]),
        TensorDescriptor.from_tensor(halves, [1, 2, rows, _COLUMNS]),
        TensorDescriptor.from_tensor(activated, [TILE, rows]),
        places.owners,
        places.used,
        PIECES=width // rows,
        INPUT=size,
        PAIRS=TILE,
        ROWS=rows,
        COLUMNS=_COLUMNS,
        STAGES=_STAGES,
        OVERLAP=overlap,
        num_warps=_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )


def _down_tiles(activated: torch.Tensor, down: torch.Tensor, outputs: torch.Tensor, places: Places) -> None:
    count, size, width = down.shape
    rows, overlap = min(2 * TILE, size & -size), overlaps(activated.device)
    _down_tiles_kernel[(processors(activated.device),)](
        TensorDescriptor.from_tensor(activated, [TILE, _COLUMNS]),
        TensorDescriptor.from_tensor(down.view(count * size, width), [rows, _COLUMNS]),
        outputs,
        places.pairs,
        places.owners,
        places.filled,
        places.used,
        PIECES=size // rows,
        INPUT=width,
        PAIRS=TILE,
        ROWS=rows,
        COLUMNS=_COLUMNS,
        STAGES=_STAGES,
        OVERLAP=overlap,
        num_warps=_WARPS,
        **({"launch_pdl": True} if overlap else {}),
    )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    count, choices = model.experts + model.shared_expert, model.choices + model.shared_expert
    gate_up = torch.empty(count, 2 * model.expert_width, model.hidden_size, dtype=dtype, device="meta")
    down = torch.empty(count, model.hidden_size, model.expert_width, dtype=dtype, device="meta")
    tokens = triton.cdiv(max(_LEAST_PAIRS.values()) * count, choices)
    hidden = torch.empty(tokens, model.hidden_size, dtype=dtype, device="meta")
    experts = torch.empty(tokens, choices, dtype=torch.int32, device="meta")
    if not suits_tiles(hidden, experts, gate_up, down):
        return []
    return [partial(tiles_of_experts, hidden, experts, gate_up, down)]
