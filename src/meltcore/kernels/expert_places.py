"""Where pairs of a token and an expert stand: in order of their expert, in tiles of some rows.

An expert's pairs begin with a tile of their own, so a tile reads one expert's weight alone. Rows behind an expert's
last pair are nobody's: a product repeats somebody's there, or computes whatever they hold, and stores nothing of it.

Few pairs are placed in one launch, in which every expert's program looks through all of them. More take three: the
pairs of each expert are counted in blocks; the blocks before each one are summed up; then each pair is placed. Nothing
is read back to the host, and no pair's place depends on the order in which programs run.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps

_MOST_FEW = 8192  # pairs that are placed in one launch
_LEAST_LOT = 1024  # of them that its programs look through at a time, at least
_FEW_TILES = 32  # of an expert, that its program writes at a time
_BLOCK = 128  # pairs of a program
_EXPERTS = 8  # of a program that sums blocks up
_BLOCKS = 512  # that it sums at a time
_TILES = 8  # of a program that places pairs: enough for one round where an expert has 40 pairs


class Places(NamedTuple):
    """rows: [tokens, choices] int32, the row of each pair. pairs: [tiles * tile] int32, the pair of each row, undefined
    where it is nobody's; owners: [tiles] int32, each tile's expert; filled: [tiles] int32, rows of it that are
    somebody's, the first ones; used: [1] int32, tiles from which on all are empty. Who owns an empty tile means
    nothing.
    """

    rows: torch.Tensor
    pairs: torch.Tensor
    owners: torch.Tensor
    filled: torch.Tensor
    used: torch.Tensor


def most_tiles(pairs: int, experts: int, tile: int) -> int:
    """That so many pairs can take, in tiles of so many: an expert ends with at most one that is not full."""
    return pairs // tile + experts


@triton.jit(do_not_specialize=["pairs"])
def _place_few_pairs_kernel(
    experts_ptr,
    rows_ptr,
    pairs_ptr,
    owners_ptr,
    filled_ptr,
    used_ptr,
    pairs,
    EXPERTS: tl.constexpr,
    LOT: tl.constexpr,
    TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one expert. It counts the pairs of those before it, then places its own.

    Its tiles begin at (pairs before) // TILE_ROWS + its number. That leaves each expert as many as it needs without
    knowing how those before filled theirs, and may leave it one more, which is empty.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    earlier = tl.zeros((LOT,), dtype=tl.int32)
    for start in tl.range(0, pairs, LOT):
        pair = start + tl.arange(0, LOT)
        earlier += (tl.load(experts_ptr + pair, mask=pair < pairs, other=EXPERTS) < expert).to(tl.int32)
    before = tl.sum(earlier, axis=0)
    first = before // TILE_ROWS + expert
    count = 0
    for start in tl.range(0, pairs, LOT):
        pair = start + tl.arange(0, LOT)
        own = (tl.load(experts_ptr + pair, mask=pair < pairs, other=EXPERTS) == expert).to(tl.int32)
        row = first * TILE_ROWS + count + tl.cumsum(own, axis=0) - 1
        tl.store(pairs_ptr + row, pair, mask=own > 0)
        tl.store(rows_ptr + pair, row, mask=own > 0)
        count += tl.sum(own, axis=0)
    after = (before + count) // TILE_ROWS + expert + 1
    for start in tl.range(first, after, TILES):
        tile = start + tl.arange(0, TILES)
        left = count - (tile - first) * TILE_ROWS
        tl.store(owners_ptr + tile, tl.zeros_like(tile) + expert, mask=tile < after)
        tl.store(filled_ptr + tile, tl.maximum(tl.minimum(left, TILE_ROWS), 0), mask=tile < after)
    if expert == EXPERTS - 1:
        tl.store(used_ptr, after)


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


def place_pairs(experts: torch.Tensor, count: int, tile: int) -> Places:
    """experts: [tokens, choices] int32, contiguous, below `count`; tile: rows of one, a power of two."""
    pairs, device = experts.numel(), experts.device
    tiles = most_tiles(pairs, count, tile)
    # Each by itself: for a row of a larger one, which may be unaligned, kernels would be compiled once more.
    pairs_of_rows, owners, filled, used = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (tiles * tile, tiles, tiles, 1)
    )
    places = Places(torch.empty_like(experts), pairs_of_rows, owners, filled, used)
    (_place_few if pairs <= _MOST_FEW else _place_many)(experts, count, tile, places)
    return places


def lot_of(pairs: int) -> int:
    """Pairs looked through at a time, where they are few; 0 where they are many. Of few sizes: each is compiled."""
    return max(triton.next_power_of_2(pairs), _LEAST_LOT) if pairs <= _MOST_FEW else 0


def _place_few(experts: torch.Tensor, count: int, tile: int, places: Places) -> None:
    overlap, lot = overlaps(experts.device), lot_of(experts.numel())
    _place_few_pairs_kernel[(count,)](
        experts,
        *places,
        experts.numel(),
        EXPERTS=count,
        LOT=lot,
        TILES=_FEW_TILES,
        TILE_ROWS=tile,
        OVERLAP=overlap,
        num_warps=4 if lot == _LEAST_LOT else 8,
        **({"launch_pdl": True} if overlap else {}),
    )


def _place_many(experts: torch.Tensor, count: int, tile: int, places: Places) -> None:
    pairs, device = experts.numel(), experts.device
    blocks, expert_block = triton.cdiv(pairs, _BLOCK), max(triton.next_power_of_2(count), _EXPERTS)
    counts = torch.empty(blocks + 1, expert_block, dtype=torch.int32, device=device)
    totals = counts[blocks]
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
        *places,
        pairs,
        len(places.owners),
        EXPERT_BLOCK=expert_block,
        BLOCK=_BLOCK,
        TILES=_TILES,
        TILE_ROWS=tile,
        OVERLAP=overlap,
        num_warps=8,
        **together,
    )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    choices, count = model.choices + model.shared_expert, model.experts + model.shared_expert

    def case(tokens: int, tile: int) -> CompileCase:
        return lambda: place_pairs(torch.empty(tokens, choices, dtype=torch.int32, device="meta"), count, tile)

    return [case(64, 16), case(_MOST_FEW // choices, 32), case(_MOST_FEW, 128)]
