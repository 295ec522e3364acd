"""Where many pairs of a token and an expert stand: in order of their expert, in tiles of TILE rows.

An expert's pairs begin with a tile of their own, so a tile reads one expert's weight alone, and what is loaded and
stored is always a whole tile, which is what the tensor memory accelerator does. Rows behind an expert's last pair are
nobody's: whatever they hold is computed and never read.

Three launches: the pairs of each expert are counted in blocks; the blocks before each one are summed up; then each pair
is placed. Nothing is read back to the host, and no pair's place depends on the order in which programs run.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

TILE = 128  # rows
_BLOCK = 256  # pairs of a program
_EXPERTS = 32  # of a program that sums blocks up
_BLOCKS = 512  # that it sums at a time
_TILES = 8  # of a program that places pairs: enough for one round where an expert has 40 pairs


class Places(NamedTuple):
    """rows: [tokens, choices] int32, the row of each pair. pairs: [tiles * TILE] int32, the pair of each row; owners:
    [tiles] int32, each tile's expert; filled: [tiles] int32, rows of it that are somebody's; used: [1] int32, how many
    tiles there are. What is behind those is undefined.
    """

    rows: torch.Tensor
    pairs: torch.Tensor
    owners: torch.Tensor
    filled: torch.Tensor
    used: torch.Tensor


def most_tiles(pairs: int, experts: int) -> int:
    """That so many pairs can take: an expert with pairs ends with at most one tile that is not full."""
    return pairs // TILE + min(pairs, experts)


@triton.jit(do_not_specialize=["pairs"])
def _count_pairs_kernel(
    experts_ptr, counts_ptr, pairs, EXPERT_BLOCK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):
    """One program: how many pairs of a block each expert has, into counts [blocks, EXPERT_BLOCK]."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    counts = tl.histogram(tl.load(experts_ptr + pair, mask=inside, other=0), EXPERT_BLOCK, mask=inside)
    tl.store(counts_ptr + block * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK), counts)


@triton.jit(do_not_specialize=["blocks"])
def _sum_blocks_kernel(
    counts_ptr,
    totals_ptr,
    blocks,
    EXPERT_BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: some experts' counts, each replaced by the sum of those before it; and their totals."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first in tl.range(0, blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)[:, None]
        place = counts_ptr + block * EXPERT_BLOCK + expert[None, :]
        counts = tl.load(place, mask=block < blocks, other=0)
        tl.store(place, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=block < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _place_pairs_kernel(
    experts_ptr,
    before_ptr,
    totals_ptr,
    rows_ptr,
    pairs_ptr,
    owners_ptr,
    filled_ptr,
    used_ptr,
    pairs,
    tiles,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: the pairs of a block, and TILES tiles at a time."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, expert = tl.program_id(0), tl.arange(0, EXPERT_BLOCK)
    totals = tl.load(totals_ptr + expert)
    own_tiles = (totals + TILE_ROWS - 1) // TILE_ROWS
    upto = tl.cumsum(own_tiles, axis=0)
    firsts = (upto - own_tiles) * TILE_ROWS + tl.load(before_ptr + block * EXPERT_BLOCK + expert)

    slot = tl.arange(0, BLOCK)
    pair = block * BLOCK + slot
    own = tl.load(experts_ptr + pair, mask=pair < pairs, other=0)
    same = (own[:, None] == own[None, :]) & (slot[None, :] < slot[:, None])
    row = tl.gather(firsts, own, axis=0) + tl.sum(same.to(tl.int32), axis=1)
    tl.store(rows_ptr + pair, row, mask=pair < pairs)
    tl.store(pairs_ptr + row, pair, mask=pair < pairs)

    for first in tl.range(block * TILES, tiles, tl.num_programs(0) * TILES):
        tile = first + tl.arange(0, TILES)
        owner = tl.sum((upto[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        mine = expert[None, :] == owner[:, None]
        left = tl.sum(tl.where(mine, (totals - (tile[:, None] - upto + own_tiles) * TILE_ROWS), 0), axis=1)
        tl.store(owners_ptr + tile, owner, mask=tile < tiles)
        tl.store(filled_ptr + tile, tl.minimum(left, TILE_ROWS), mask=tile < tiles)
    if block == 0:
        tl.store(used_ptr, tl.max(upto, axis=0))


def place_pairs(experts: torch.Tensor, count: int) -> Places:
    """experts: [tokens, choices] int32, contiguous, below `count`."""
    pairs, device = experts.numel(), experts.device
    blocks, tiles, expert_block = triton.cdiv(pairs, _BLOCK), most_tiles(pairs, count), triton.next_power_of_2(count)
    expert_block = max(expert_block, _EXPERTS)
    counts = torch.empty(blocks + 1, expert_block, dtype=torch.int32, device=device)
    totals = counts[blocks]
    rows = torch.empty_like(experts)
    # Each by itself: for a row of a larger one, which may be unaligned, kernels would be compiled once more.
    pairs_of_rows, owners, filled, used = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (tiles * TILE, tiles, tiles, 1)
    )
    overlap = overlaps(device)
    together = {"launch_pdl": True} if overlap else {}
    _count_pairs_kernel[(blocks,)](
        experts, counts, pairs, EXPERT_BLOCK=expert_block, BLOCK=_BLOCK, OVERLAP=overlap, num_warps=4, **together
    )
    _sum_blocks_kernel[(expert_block // _EXPERTS,)](
        counts,
        totals,
        blocks,
        EXPERT_BLOCK=expert_block,
        EXPERTS=_EXPERTS,
        BLOCKS=_BLOCKS,
        OVERLAP=overlap,
        num_warps=8,
        **together,
    )
    _place_pairs_kernel[(blocks,)](
        experts,
        counts,
        totals,
        rows,
        pairs_of_rows,
        owners,
        filled,
        used,
        pairs,
        tiles,
        EXPERT_BLOCK=expert_block,
        BLOCK=_BLOCK,
        TILES=_TILES,
        TILE_ROWS=TILE,
        OVERLAP=overlap,
        num_warps=8,
        **together,
    )
    return Places(rows, pairs_of_rows, owners, filled, used)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    experts = torch.empty(64, model.choices + model.shared_expert, dtype=torch.int32, device="meta")
    return [lambda: place_pairs(experts, model.experts + model.shared_expert)]
