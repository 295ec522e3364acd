"""What products in tiles have in common, of 16-bit numbers and of FP8: their sums, and shares of a sum added up."""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache

import torch

from meltcore.kernels.jit import tl, triton

_MOST_SPLIT_TILES = 1024


@triton.jit
def source_of(row, OUTPUT: tl.constexpr, GATED: tl.constexpr):
    """The row of the weight that stands at this one of a product: where they are gated, a gate's and what it gates in
    turns; past the end the first ones again."""
    if GATED:
        source = row // 2 % OUTPUT + row % 2 * OUTPUT
    else:
        source = row % OUTPUT
    return source


@triton.jit
def gated_pairs(totals):
    """[tokens, rows] of gates and what they gate in turns -> [tokens, rows // 2]: silu(gate) * up."""
    gate, up = tl.split(tl.reshape(totals, (totals.shape[0], totals.shape[1] // 2, 2)))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def tile_sums(
    rows_ptr,
    tokens_ptr,
    step,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Of WIDTH columns of the rows and tokens at these pointers, [ROWS, 1] and [TOKENS, 1], the sums of products in
    float32: [ROWS, TOKENS], or [TOKENS, ROWS] where tokens are more. step: the columns of one, [1, COLUMNS]."""
    # The tensor cores want the longer side first: 64 rows at least on Hopper.
    if ROWS >= TOKENS:
        totals = tl.zeros((ROWS, TOKENS), dtype=tl.float32)
    else:
        totals = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        weight = tl.load(rows_ptr + start + step)
        tokens = tl.load(tokens_ptr + start + step)
        if ROWS >= TOKENS:
            totals = tl.dot(weight, tl.trans(tokens), totals)
        else:
            totals = tl.dot(tokens, tl.trans(weight), totals)
    return totals


@triton.jit
def sum_of_shares(totals, partial_ptr, arrivals_ptr, tile, share, SHARES: tl.constexpr):
    """Leave this program's share where the others find it. Returns whether it is the tile's last, and the whole sum."""
    ROWS: tl.constexpr = totals.shape[0]
    COLUMNS: tl.constexpr = totals.shape[1]
    place = partial_ptr + tile.to(tl.int64) * (SHARES * ROWS * COLUMNS)
    place += tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(place + share * (ROWS * COLUMNS), totals)
    tl.debug_barrier()  # all of this program's share is written before it is counted
    last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") == SHARES - 1
    if last:
        tl.store(arrivals_ptr + tile, 0)
        # Other processors wrote them during this launch: past the L1 cache, which may hold older neighbours.
        totals = tl.load(place, cache_modifier=".cg")
        for other in tl.static_range(1, SHARES):
            totals += tl.load(place + other * (ROWS * COLUMNS), cache_modifier=".cg")
    return last, totals


@lru_cache
def tile_arrivals(device: torch.device) -> torch.Tensor:
    """How many shares of each tile are done: zeros before and after every launch.

    One for the device, since launches follow each other on one stream. Made once: captured graphs keep its address.
    """
    return torch.zeros(_MOST_SPLIT_TILES, dtype=torch.int32, device=device)


def room_for_shares(
    grid: tuple[int, int, int], tile_numbers: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the shares of a grid of (shares, tiles, tiles) are left, `tile_numbers` float32 each, and counted.

    Raises ValueError for more tiles than can be counted.
    """
    shares, rows, tokens = grid
    if rows * tokens > _MOST_SPLIT_TILES:
        raise ValueError(f"{rows * tokens} tiles cannot be split; at most {_MOST_SPLIT_TILES} can")
    partial = torch.empty(shares * rows * tokens * tile_numbers, dtype=torch.float32, device=device)
    return partial, tile_arrivals(device)
