"""Attention over a paged cache of one new token of many sequences (decode).

A cache is [pages, page_size, kv_heads, head_dim], contiguous. The page table is the engine's persistent one,
[rows, max_pages] int64: entry p of a row is the cache page of that sequence's tokens p * page_size and on.

One kernel takes a token from the fused product to its attention: whichever program holds the end of a sequence stores
the new key and value, and whichever ends last merges the sequence's shares. Three launches a layer become one.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from meltcore.kernels.attend import (
    attend_block,
    attend_torch,
    gather_pages,
    in_pairs,
    put_together,
    require_layout,
)
from meltcore.kernels.capability import capability, processors, shared_bytes
from meltcore.kernels.decode_lanes import decode_in_lanes, lanes_of
from meltcore.kernels.decode_share import (
    MOST_SPLIT_PAIRS,
    arrivals_of,
    begin_share,
    block_keys_of,
    hand_in,
    least_rows,
    no_queries,
    nothing_seen,
)
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps
from meltcore.kernels.qkv import HeadNorms, store_kv, turned_queries


def decode_attention(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    splits: int | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Store the key and value of one new token a sequence as `store_kv` does, and attend to the whole sequence.

    qkv: [sequences, (heads + 2 * kv_heads) * head_dim]; heads is a multiple of kv_heads; norms: of the heads, or None;
    rotary_table: [max_positions, head_dim] float32; positions: [sequences] int64, the new token's, which sees all
    tokens before it and itself. It is -1 for the padding of a CUDA graph: zeros come out, and neither the table nor
    the caches are touched. rows: [sequences] int64, each sequence's row in the page table. splits: into how many
    shares at most a sequence's keys are divided, a power of two; None to choose. Returns
    [sequences, heads, head_dim], in `out` where it is given.
    """
    kv_heads, head_dim = key_cache.shape[2:]
    if out is None:
        out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads, head_dim)
    body = _decode_triton if use_triton(qkv) else _decode_torch
    body(qkv, norms, rotary_table, positions, key_cache, value_cache, page_table, rows, scale, out, splits)
    return out


def _decode_torch(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    splits: int | None,
) -> None:
    out.zero_()
    real = (positions >= 0).nonzero()[:, 0]
    positions, rows = positions[real], rows[real]
    page_size = key_cache.shape[1]
    slots = page_table[rows, positions // page_size] * page_size + positions % page_size
    store_kv(qkv[real], norms, rotary_table, positions, slots, key_cache, value_cache)
    queries = turned_queries(qkv[real], norms, rotary_table, positions, key_cache.shape[2])
    for i, (row, position) in enumerate(zip(rows.tolist(), positions.tolist(), strict=True)):
        keys, values = gather_pages(key_cache, value_cache, page_table[row], position + 1)
        out[real[i]] = attend_torch(queries[i : i + 1], keys, values, position, scale)[0]


# Shared memory of a program, by its stages: one block of keys and of values less, 32 KiB each pair, and a little more.
_PROGRAM_BYTES = {3: 72 * 2**10, 4: 104 * 2**10}
# Shares of a sequence. More would take longer to merge than they save.
_MOST_SPLITS = 64


class DecodeLaunch(NamedTuple):
    """How the work of a decode step is cut up. See `decode_launch`."""

    splits: int
    share_pages: int
    block_keys: int
    warps: int
    stages: int
    ahead: bool  # whether to start, and ask for a share's first blocks, before the kernel in front has ended


def decode_launch(
    sequences: int,
    kv_heads: int,
    head_dim: int,
    element_bytes: int,
    max_pages: int,
    processors: int,
    shared_bytes: int,
) -> DecodeLaunch:
    """Fixed by the shapes alone, so that a graph can capture it; lengths are known to the device only. element_bytes:
    of a number in the cache.

    A share is about `share_pages` pages, or more where a sequence has more than `splits` such shares; the shares of a
    sequence are of about one length. Few sequences start early and are cut into as many shares as can run at once, with
    three stages or four, whichever leaves less of the shared memory empty (`shared_bytes`, of a processor).
    Many are best left whole (400 sequences of 640 tokens: 97 % of read bandwidth, in two shares each 89 %; H200,
    2026-11-21), but for the very long ones among them, which would hold up the rest: a second program a sequence costs
    next to nothing where it finds no share. Not so with heads of 256, which it slows from 165 to 206 us at 256
    sequences of 1,280 tokens (2026-11-22).
    """
    pairs = sequences * kv_heads
    ahead = pairs < processors
    if ahead:
        share_pages = 1
        stages, most = _shares_of_few(pairs, processors, shared_bytes)
    else:
        share_pages, stages, most = 32, 3, 2 if pairs <= 32 * processors and head_dim <= 128 else 1
    splits = 1 << (min(most, _MOST_SPLITS, -(-max_pages // share_pages)).bit_length() - 1)
    # Heads of 256: 165 us by 8 warps and 179 by 4 at 256 sequences of 1,280 tokens, but 80 and 59 at 64; in FP8 100 and
    # 97 at 256 (H200, 2026-11-22).
    warps = 8 if head_dim > 128 and not ahead and element_bytes > 1 else 4
    block_keys = block_keys_of(head_dim, element_bytes)
    if element_bytes == 1 and not ahead:
        stages = 4  # blocks have half the bytes and take as many instructions; of 128 dims four programs still fit
    elif element_bytes == 1 and head_dim <= 128:
        stages = 2 * stages - 1  # twice as many blocks of half the bytes on the way
    return DecodeLaunch(splits, share_pages, block_keys, warps=warps, stages=stages, ahead=ahead)


def _shares_of_few(pairs: int, processors: int, shared_bytes: int) -> tuple[int, int]:
    """Stages, and the most shares of a sequence, a power of two, that leave the fewest places for programs empty."""
    choices = []
    for stages, program_bytes in _PROGRAM_BYTES.items():
        places = processors * (shared_bytes // program_bytes)
        splits = 1 << (max(1, places // pairs).bit_length() - 1)
        choices.append((pairs * splits / places if places else 0.0, stages, splits))
    _, stages, splits = max(choices)
    return stages, splits


def _launch_for(sequences: int, key_cache: torch.Tensor, page_table: torch.Tensor) -> DecodeLaunch:
    _, _, kv_heads, head_dim = key_cache.shape
    element_bytes, max_pages, device = key_cache.element_size(), page_table.shape[1], key_cache.device
    return decode_launch(
        sequences, kv_heads, head_dim, element_bytes, max_pages, processors(device), shared_bytes(device)
    )


def _places_of_shares(out: torch.Tensor, kv_heads: int, splits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(partial, weights, arrivals), as in decode_share.py; `out` in their places where there is nothing to merge."""
    sequences, heads, head_dim = out.shape
    if splits == 1:
        return out, out, out
    if sequences * kv_heads > MOST_SPLIT_PAIRS:
        raise ValueError(f"{sequences} sequences of {kv_heads} key heads cannot be split")
    partial = torch.empty(sequences, heads, splits, head_dim, dtype=torch.float32, device=out.device)
    weights = torch.empty(sequences, heads, splits, dtype=torch.float32, device=out.device)
    return partial, weights, arrivals_of(out.device)


def _decode_triton(
    qkv: torch.Tensor,
    norms: HeadNorms | None,
    rotary_table: torch.Tensor,
    positions: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    page_table: torch.Tensor,
    rows: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    splits: int | None,
    launch: DecodeLaunch | None = None,
) -> None:
    sequences, heads, head_dim = out.shape
    _, page_size, kv_heads, _ = key_cache.shape
    require_layout(qkv, key_cache, value_cache, page_table, out)
    if sequences == 0:
        return
    lanes = lanes_of(sequences, heads, kv_heads, head_dim, qkv.device) if launch is None and splits is None else None
    if lanes:
        decode_in_lanes(
            qkv, norms, rotary_table, positions, key_cache, value_cache, page_table, rows, scale, out, lanes
        )
        return
    launch = launch or _launch_for(sequences, key_cache, page_table)
    if splits is not None:
        launch = launch._replace(splits=splits)
    overlap = launch.ahead and overlaps(qkv.device)
    partial, weights, arrivals = _places_of_shares(out, kv_heads, launch.splits)
    # Key heads vary fastest: programs that run together read neighbouring parts of the same pages. Splits vary
    # slowest: the programs without work are the last.
    _decode_kernel[(kv_heads, sequences, launch.splits)](
        qkv,
        norms.query if norms else qkv,
        norms.key if norms else qkv,
        rotary_table,
        positions,
        key_cache,
        value_cache,
        page_table,
        rows,
        out,
        partial,
        weights,
        arrivals,
        norms.eps if norms else 0.0,
        scale * math.log2(math.e),
        launch.share_pages,
        qkv.stride(0),
        page_table.stride(0),
        NORMED=norms is not None,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        ROWS=least_rows(heads // kv_heads),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_KEYS=launch.block_keys,
        CUT=launch.splits > 1,
        AHEAD=launch.ahead,
        OVERLAP=overlap,
        num_warps=launch.warps,
        num_stages=launch.stages,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit(do_not_specialize=["least_pages"])
def _decode_kernel(
    qkv,
    query_weight,
    key_weight,
    rotary_table,
    positions,
    key_cache,
    value_cache,
    page_table,
    rows,
    out,
    partial,
    weights,
    arrivals,
    eps,
    scale_log2,
    least_pages,
    qkv_stride,
    table_stride,
    NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    CUT: tl.constexpr,
    AHEAD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One share of one sequence for one key head: its query heads are the rows of a tile."""
    READ_DIM: tl.constexpr = HEAD_DIM // 2 if key_cache.dtype.element_ty == tl.float8e4nv else HEAD_DIM
    kv_head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    position = tl.load(positions + sequence).to(tl.int32)
    pages = page_table + tl.load(rows + sequence) * table_stride
    # Shares are of whole pages and of about one length. The new token, not in the cache yet, counts as the last key.
    held = tl.maximum(tl.cdiv(position + 1, PAGE_SIZE), 1)
    share = tl.cdiv(held, tl.minimum(tl.cdiv(held, least_pages), splits)) * PAGE_SIZE
    first = split * share
    last = tl.minimum(first + share, position)
    member = tl.arange(0, ROWS)
    in_group = (member < GROUP)[:, None]
    dims = tl.arange(0, HEAD_DIM)
    place = (sequence * KV_HEADS + kv_head) * GROUP + member  # of each head's row in the output
    result = out + place[:, None] * HEAD_DIM + dims[None, :]
    if first > position:
        if OVERLAP:
            # Before any program may end, or this launch could be over before the one in front.
            tl.extra.cuda.gdc_wait()
        if position < 0 and split == 0:
            tl.store(result, tl.zeros((ROWS, HEAD_DIM), out.dtype.element_ty), in_group)
        return

    page = tl.load(pages + first // PAGE_SIZE)
    block = tl.arange(0, BLOCK_KEYS)
    within = (block[:, None] * KV_HEADS + kv_head) * READ_DIM + tl.arange(0, READ_DIM)[None, :]
    keys_at, values_at = in_pairs(key_cache), in_pairs(value_cache)
    is_last = position < first + share
    if AHEAD:
        queries = no_queries(qkv, key_cache, ROWS, HEAD_DIM)
        mixed, total, highest = nothing_seen(value_cache, ROWS, HEAD_DIM)
    else:
        queries, mixed, total, highest = begin_share(
            *(qkv, query_weight, key_weight, rotary_table, key_cache, value_cache, pages, sequence, position),
            *(is_last, kv_head, eps, scale_log2, qkv_stride),
            *(NORMED, KV_HEADS, GROUP, 1, ROWS, HEAD_DIM, PAGE_SIZE, OVERLAP),
        )
    # One block at least, if only to begin with. A page's number is loaded one block ahead of its keys, whose addresses
    # wait for it.
    for start in range(first, tl.maximum(last, first + 1), BLOCK_KEYS):
        following = start + BLOCK_KEYS
        next_page = tl.load(pages + following // PAGE_SIZE, following < last, other=0)
        base = (page * PAGE_SIZE + start % PAGE_SIZE) * (KV_HEADS * READ_DIM)
        filled = start + block < last
        keys = tl.load(keys_at + base + within, filled[:, None], other=0.0)
        values = tl.load(values_at + base + within, filled[:, None], other=0.0)
        if AHEAD and start == first:  # in the loop, whose first blocks are on their way before it is entered
            queries, mixed, total, highest = begin_share(
                *(qkv, query_weight, key_weight, rotary_table, key_cache, value_cache, pages, sequence, position),
                *(is_last, kv_head, eps, scale_log2, qkv_stride),
                *(NORMED, KV_HEADS, GROUP, 1, ROWS, HEAD_DIM, PAGE_SIZE, OVERLAP),
            )
        mixed, total, highest = attend_block(
            queries, keys, values, filled[None, :], mixed, total, highest, scale_log2, MASKED=True
        )
        page = next_page

    mixed = put_together(mixed, ROWS, HEAD_DIM) / total[:, None]
    shares = tl.cdiv(position + 1, share)
    if not CUT:  # noqa: SIM114, known when compiled: what merges is left out
        tl.store(result, mixed.to(out.dtype.element_ty), in_group)
    elif shares == 1:
        tl.store(result, mixed.to(out.dtype.element_ty), in_group)
    else:
        pair = sequence * KV_HEADS + kv_head
        rows_from = pair * GROUP * splits
        hand_in(
            *(out, partial, weights, arrivals, mixed, total, highest, pair, split, shares, rows_from, splits, 1),
            *(ROWS, GROUP, HEAD_DIM, 8),
        )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    qkv = torch.empty(64, width, dtype=dtype, device="meta")
    out = torch.empty(64, model.heads, model.head_dim, dtype=dtype, device="meta")
    cache = torch.empty(128, model.page_size, model.kv_heads, model.head_dim, dtype=dtype, device="meta")
    page_table = torch.empty(64, 640, dtype=torch.int64, device="meta")
    rotary = torch.empty(4096, model.head_dim, device="meta")
    column = page_table[:, 0]

    norms = HeadNorms(qkv[0], qkv[0], 1e-6)

    def case(norms: HeadNorms | None, splits: int, sequences: int = 1000, cache: torch.Tensor = cache) -> CompileCase:
        sizes = model.kv_heads, model.head_dim, cache.element_size(), 640, 132
        launch = decode_launch(sequences, *sizes, shared_bytes(cache.device))
        given = qkv, norms, rotary, column, cache, cache, page_table, column
        return lambda: _decode_triton(*given, 1.0, out, splits, launch)

    kinds = [cache, cache.to(FP8)] if capability(cache.device) >= FP8_CAPABILITY else [cache]
    cases = [case(None, 16, 1)]
    for kind in kinds:
        cases += [case(norms, splits, cache=kind) for splits in (1, 2)]
        cases += [case(norms, 16, few, kind) for few in (1, 12)]
    return cases
