"""MoE alignment sorts pairs of a token and an expert by expert, and pads each expert's pairs to whole tiles.

Every tile then reads the weight of one expert only. Padding rows behind an expert's last pair are undefined. A GEMM may
compute any values for them, and does not store the result.

Few pairs are aligned in one launch, in which every expert's program scans all of them. Many pairs take three launches:
the pairs of each expert are counted per block, a prefix sum runs over the blocks, and each pair is written to its row.
Nothing is read back to the host, and no pair's row depends on the order in which programs run.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync

_MAX_PAIRS_ONE_LAUNCH = 8192
_MIN_SCAN = 1024  # of these pairs, how many a program scans at a time, at least
_SCAN_TILES = 32  # tiles of an expert that its program writes at a time
_PAIR_BLOCK = 128  # pairs per program that counts or writes pairs
_PREFIX_SUM_EXPERTS = 8  # per program of the prefix sum
_PREFIX_SUM_BLOCKS = 512  # that it sums at a time
_TILES_PER_PROGRAM = 8  # per program that writes pairs: enough for one round where an expert has 40 pairs


class Alignment(NamedTuple):
    """The pairs of tokens and experts, sorted by expert and cut into tiles of `block_m` rows.

    Args:
        src2dst: [tokens, top_k] int32, the row of each pair.
        sorted_token_ids: [tiles * block_m] int32, the pair of each row, undefined for padding.
        expert_ids: [tiles] int32, the expert of each tile, undefined for empty tiles.
        num_valid: [tiles] int32, the number of pairs of each tile. They are in the tile's first rows.
        num_tiles: [1] int32. Later tiles are empty.
        block_m: rows of a tile.
    """

    src2dst: torch.Tensor
    sorted_token_ids: torch.Tensor
    expert_ids: torch.Tensor
    num_valid: torch.Tensor
    num_tiles: torch.Tensor


def max_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Return an upper bound of the number of tiles: at most one tile per expert is not full."""
    return num_pairs // block_m + num_experts


@triton.jit(do_not_specialize=["num_pairs"])
def _moe_align_few_kernel(
    topk_ids_ptr,
    src2dst_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    num_tiles_ptr,
    num_pairs,
    EXPERTS: tl.constexpr,
    SCAN: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program handles one expert: it counts the pairs of the experts before it, then writes its own pairs.

    The expert's tiles start at (pairs before) // BLOCK_M + expert. So every expert has enough tiles, whatever the other
    experts' last tiles hold. It may have one more tile, which is empty.
    """
    pdl_sync(PDL)
    expert = tl.program_id(0)
    num_smaller = tl.zeros((SCAN,), dtype=tl.int32)
    for start in tl.range(0, num_pairs, SCAN):
        pair = start + tl.arange(0, SCAN)
        num_smaller += (tl.load(topk_ids_ptr + pair, mask=pair < num_pairs, other=EXPERTS) < expert).to(tl.int32)
    num_before = tl.sum(num_smaller, axis=0)
    first_tile = num_before // BLOCK_M + expert
    num_pairs_of_expert = 0
    for start in tl.range(0, num_pairs, SCAN):
        pair = start + tl.arange(0, SCAN)
        is_expert = (tl.load(topk_ids_ptr + pair, mask=pair < num_pairs, other=EXPERTS) == expert).to(tl.int32)
        row = first_tile * BLOCK_M + num_pairs_of_expert + tl.cumsum(is_expert, axis=0) - 1
        tl.store(sorted_token_ids_ptr + row, pair, mask=is_expert > 0)
        tl.store(src2dst_ptr + pair, row, mask=is_expert > 0)
        num_pairs_of_expert += tl.sum(is_expert, axis=0)
    end_tile = (num_before + num_pairs_of_expert) // BLOCK_M + expert + 1
    for start in tl.range(first_tile, end_tile, TILES):
        tile = start + tl.arange(0, TILES)
        rows_left = num_pairs_of_expert - (tile - first_tile) * BLOCK_M
        tl.store(expert_ids_ptr + tile, tl.zeros_like(tile) + expert, mask=tile < end_tile)
        tl.store(num_valid_ptr + tile, tl.maximum(tl.minimum(rows_left, BLOCK_M), 0), mask=tile < end_tile)
    if expert == EXPERTS - 1:
        tl.store(num_tiles_ptr, end_tile)


@triton.jit(do_not_specialize=["num_pairs"])
def _moe_count_pairs_kernel(
    topk_ids_ptr, counts_ptr, num_pairs, EXPERT_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Each program counts the pairs of one block per expert and writes a row of counts [blocks, EXPERT_BLOCK]."""
    pdl_sync(PDL)
    block = tl.program_id(0)
    pair = block * BLOCK + tl.arange(0, BLOCK)
    mask = pair < num_pairs
    counts = tl.histogram(tl.load(topk_ids_ptr + pair, mask=mask, other=0), EXPERT_BLOCK, mask=mask)
    tl.store(counts_ptr + block * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK), counts)


@triton.jit(do_not_specialize=["blocks"])
def _moe_prefix_sum_kernel(
    counts_ptr,
    totals_ptr,
    blocks,
    EXPERT_BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program replaces the counts of EXPERTS experts by exclusive prefix sums over blocks, and stores totals."""
    pdl_sync(PDL)
    expert = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    total = tl.zeros((EXPERTS,), dtype=tl.int32)
    for first_block in tl.range(0, blocks, BLOCKS):
        block = first_block + tl.arange(0, BLOCKS)[:, None]
        count_ptr = counts_ptr + block * EXPERT_BLOCK + expert[None, :]
        counts = tl.load(count_ptr, mask=block < blocks, other=0)
        tl.store(count_ptr, total[None, :] + tl.cumsum(counts, axis=0) - counts, mask=block < blocks)
        total += tl.sum(counts, axis=0)
    tl.store(totals_ptr + expert, total)


@triton.jit(do_not_specialize=["num_pairs", "tiles"])
def _moe_align_many_kernel(
    topk_ids_ptr,
    prefix_sums_ptr,
    totals_ptr,
    src2dst_ptr,
    sorted_token_ids_ptr,
    expert_ids_ptr,
    num_valid_ptr,
    num_tiles_ptr,
    num_pairs,
    tiles,
    EXPERT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program writes the pairs of one block to their rows, and fills in TILES tiles at a time."""
    pdl_sync(PDL)
    block, expert = tl.program_id(0), tl.arange(0, EXPERT_BLOCK)
    totals = tl.load(totals_ptr + expert)
    expert_tiles = (totals + BLOCK_M - 1) // BLOCK_M
    tile_ends = tl.cumsum(expert_tiles, axis=0)
    first_rows = (tile_ends - expert_tiles) * BLOCK_M + tl.load(prefix_sums_ptr + block * EXPERT_BLOCK + expert)

    slot = tl.arange(0, BLOCK)
    pair = block * BLOCK + slot
    pair_expert = tl.load(topk_ids_ptr + pair, mask=pair < num_pairs, other=0)
    is_earlier = (pair_expert[:, None] == pair_expert[None, :]) & (slot[None, :] < slot[:, None])
    row = tl.gather(first_rows, pair_expert, axis=0) + tl.sum(is_earlier.to(tl.int32), axis=1)
    tl.store(src2dst_ptr + pair, row, mask=pair < num_pairs)
    tl.store(sorted_token_ids_ptr + row, pair, mask=pair < num_pairs)

    for first_tile in tl.range(block * TILES, tiles, tl.num_programs(0) * TILES):
        tile = first_tile + tl.arange(0, TILES)
        tile_expert = tl.sum((tile_ends[None, :] <= tile[:, None]).to(tl.int32), axis=1)
        is_expert = expert[None, :] == tile_expert[:, None]
        rows_left = tl.sum(
            tl.where(is_expert, (totals - (tile[:, None] - tile_ends + expert_tiles) * BLOCK_M), 0), axis=1
        )
        tl.store(expert_ids_ptr + tile, tile_expert, mask=tile < tiles)
        tl.store(num_valid_ptr + tile, tl.minimum(rows_left, BLOCK_M), mask=tile < tiles)
    if block == 0:
        tl.store(num_tiles_ptr, tl.max(tile_ends, axis=0))


def moe_align_block_size(topk_ids: torch.Tensor, block_m: int, num_experts: int) -> Alignment:
    """Sort the pairs of tokens and experts by expert, padded to tiles of `block_m` rows, a power of two.

    topk_ids: [tokens, top_k] int32, contiguous.
    """
    num_pairs, device = topk_ids.numel(), topk_ids.device
    tiles = max_tiles(num_pairs, num_experts, block_m)
    # Separate tensors: for a slice of a larger one, which may be unaligned, kernels would be compiled once more.
    sorted_token_ids, expert_ids, num_valid, num_tiles = (
        torch.empty(size, dtype=torch.int32, device=device) for size in (tiles * block_m, tiles, tiles, 1)
    )
    alignment = Alignment(torch.empty_like(topk_ids), sorted_token_ids, expert_ids, num_valid, num_tiles)
    align = _align_few if num_pairs <= _MAX_PAIRS_ONE_LAUNCH else _align_many
    align(topk_ids, num_experts, block_m, alignment)
    return alignment


def scan_size(num_pairs: int) -> int:
    """Return how many pairs the single launch scans at a time, or 0 if there are too many pairs for a single launch.

    Only a few sizes are possible, since the kernel is compiled for each size.
    """
    return max(triton.next_power_of_2(num_pairs), _MIN_SCAN) if num_pairs <= _MAX_PAIRS_ONE_LAUNCH else 0


def _align_few(topk_ids: torch.Tensor, num_experts: int, block_m: int, alignment: Alignment) -> None:
    scan = scan_size(topk_ids.numel())
    _moe_align_few_kernel[(num_experts,)](
        topk_ids,
        *alignment,
        topk_ids.numel(),
        EXPERTS=num_experts,
        SCAN=scan,
        TILES=_SCAN_TILES,
        BLOCK_M=block_m,
        num_warps=4 if scan == _MIN_SCAN else 8,
        **pdl_options(topk_ids.device),
    )


def _align_many(topk_ids: torch.Tensor, num_experts: int, block_m: int, alignment: Alignment) -> None:
    num_pairs, device = topk_ids.numel(), topk_ids.device
    blocks, expert_block = (
        triton.cdiv(num_pairs, _PAIR_BLOCK),
        max(triton.next_power_of_2(num_experts), _PREFIX_SUM_EXPERTS),
    )
    counts = torch.empty(blocks + 1, expert_block, dtype=torch.int32, device=device)
    totals = counts[blocks]
    pdl = pdl_options(device)
    _moe_count_pairs_kernel[(blocks,)](
        topk_ids, counts, num_pairs, EXPERT_BLOCK=expert_block, BLOCK=_PAIR_BLOCK, num_warps=4, **pdl
    )
    _moe_prefix_sum_kernel[(expert_block // _PREFIX_SUM_EXPERTS,)](
        counts,
        totals,
        blocks,
        EXPERT_BLOCK=expert_block,
        EXPERTS=_PREFIX_SUM_EXPERTS,
        BLOCKS=_PREFIX_SUM_BLOCKS,
        num_warps=8,
        **pdl,
    )
    _moe_align_many_kernel[(blocks,)](
        topk_ids,
        counts,
        totals,
        *alignment,
        num_pairs,
        len(alignment.expert_ids),
        EXPERT_BLOCK=expert_block,
        BLOCK=_PAIR_BLOCK,
        TILES=_TILES_PER_PROGRAM,
        BLOCK_M=block_m,
        num_warps=8,
        **pdl,
    )
