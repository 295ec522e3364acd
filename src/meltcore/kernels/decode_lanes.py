"""Decode attention of a middling number of sequences: enough to fill the device, too few to leave its rounds even.

With a program for each sequence and key head, 100 sequences of 8 key heads are 800 programs where 396 run at a time:
two rounds, and a third for the rest. Here all pages of all sequences are laid in one line, cut into lanes of one
length, as many as run at once, and every lane is walked by one program for each key head. Where a lane ends within a
sequence the sequence is shared, and the last of its programs to end merges the shares (the schedule of Stream-K, Osama
et al. 2023, arXiv:2301.03598, for attention).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math

import torch

from meltcore.kernels.attend import attend_block, rotated
from meltcore.kernels.capability import capability, processors, shared_bytes
from meltcore.kernels.decode_share import arrivals_of, begin_with_new, block_keys_of, hand_in, least_rows
from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps
from meltcore.kernels.qkv import HeadNorms

# Every program adds up the pages of this many sequences; more of them leave their rounds even enough.
MOST_SEQUENCES = 128
MOST_HEAD_DIM = 128
_STAGES = 3
_WARPS = 4


def lane_count(sequences: int, kv_heads: int, head_dim: int, device: torch.device) -> int:
    """How many lanes a decode step is cut into; 0 where it is better left to `decode_attention`'s own kernel.

    As many programs as run at once: shared memory holds three blocks of keys and of values for each, one of them under
    way, so two to a processor on Hopper. (The registers of a third fit only smaller blocks, which are slower.)
    """
    programs = processors(device) * max(1, shared_bytes(device) // (96 * 2**10))
    if sequences > MOST_SEQUENCES or sequences * kv_heads < processors(device) or head_dim > MOST_HEAD_DIM:
        return 0
    return max(1, programs // kv_heads)


def decode_in_lanes(
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
    lanes: int,
) -> None:
    """`decode_attention` of at most MOST_SEQUENCES sequences, into `out`."""
    sequences, heads, head_dim = out.shape
    _, page_size, kv_heads, _ = key_cache.shape
    if sequences > MOST_SEQUENCES:
        raise ValueError(f"{sequences} sequences; lanes are cut for at most {MOST_SEQUENCES}")
    # Neighbouring lanes meet in one sequence at most, so lane + sequence names each share of a cut sequence.
    partial = torch.empty(lanes + sequences, heads, head_dim, dtype=torch.float32, device=out.device)
    weights = torch.empty(lanes + sequences, heads, dtype=torch.float32, device=out.device)
    overlap = overlaps(qkv.device)
    _lanes_kernel[(kv_heads, lanes)](
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
        arrivals_of(out.device),
        sequences,
        norms.eps if norms else 0.0,
        scale * math.log2(math.e),
        qkv.stride(0),
        page_table.stride(0),
        NORMED=norms is not None,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        ROWS=least_rows(heads // kv_heads),
        HEAD_DIM=head_dim,
        PAGE_SIZE=page_size,
        BLOCK_KEYS=block_keys_of(head_dim, qkv.element_size()),
        BLOCK_SEQUENCES=MOST_SEQUENCES,
        OVERLAP=overlap,
        num_warps=_WARPS,
        num_stages=_STAGES,
        **({"launch_pdl": True} if overlap else {}),
    )


@triton.jit(do_not_specialize=["sequences"])
def _lanes_kernel(
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
    sequences,
    eps,
    scale_log2,
    qkv_stride,
    table_stride,
    NORMED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_SEQUENCES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One lane for one key head: its query heads are the rows of a tile."""
    kv_head = tl.program_id(0)
    lane = tl.program_id(1)
    # No recent kernel wrote positions, rows and page numbers: they are read before the one in front has ended.
    index = tl.arange(0, BLOCK_SEQUENCES)
    each = tl.load(positions + index, index < sequences, other=0).to(tl.int32)
    # Padding counts as a page, so that some program writes its zeros.
    held = tl.where(index < sequences, tl.maximum(tl.cdiv(each + 1, PAGE_SIZE), 1), 0)
    ends = tl.cumsum(held, 0)
    total_pages = tl.sum(held, 0)
    # Every lane has a page, so that the shares of a sequence can be counted.
    lanes = tl.minimum(tl.num_programs(1), total_pages)
    begin = lane * total_pages // lanes
    end = (lane + 1) * total_pages // lanes
    sequence = tl.sum((ends <= begin).to(tl.int32), 0)
    origin = tl.sum(tl.where(index < sequence, held, 0), 0)  # the page of the line where `sequence` begins
    walked = tl.sum(((ends - held < end) & (ends > begin) & (begin < end) & (held > 0)).to(tl.int32), 0)
    position = tl.load(positions + sequence, walked > 0, other=0).to(tl.int32)
    row = tl.load(rows + sequence, walked > 0, other=0)
    page = tl.load(page_table + row * table_stride + (begin - origin), walked > 0, other=0)
    if OVERLAP:
        # Before any program may end, or this launch could be over before the one in front.
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    dims = tl.arange(0, HEAD_DIM)
    column = tl.broadcast_to(dims[None, :], (ROWS, HEAD_DIM))
    partner = (column + HEAD_DIM // 2) % HEAD_DIM
    block = tl.arange(0, BLOCK_KEYS)
    within = (block[:, None] * KV_HEADS + kv_head) * HEAD_DIM + dims[None, :]
    member = tl.arange(0, ROWS)
    in_group = (member < GROUP)[:, None]
    for step in range(walked):
        pages = page_table + row * table_stride
        count = tl.maximum(tl.cdiv(position + 1, PAGE_SIZE), 1)
        first_page = tl.maximum(begin - origin, 0)
        last_page = tl.minimum(end - origin, count)
        # What the next sequence needs first is on its way while this one is computed.
        more = step + 1 < walked
        next_position = tl.load(positions + sequence + 1, more, other=0).to(tl.int32)
        next_row = tl.load(rows + sequence + 1, more, other=0)
        next_page = tl.load(page_table + next_row * table_stride, more, other=0)

        angle = rotary_table + tl.maximum(position, 0).to(tl.int64) * HEAD_DIM + column % (HEAD_DIM // 2)
        cos, sin = tl.load(angle), tl.load(angle + HEAD_DIM // 2)
        sin = tl.where(column < HEAD_DIM // 2, -sin, sin)
        token = qkv + sequence.to(tl.int64) * qkv_stride
        # Rows past the group repeat its last head: cheaper than a mask on every load.
        own = token + (kv_head * GROUP + tl.minimum(member, GROUP - 1))[:, None] * HEAD_DIM
        query, other = tl.load(own + column), tl.load(own + partner)
        query = rotated(query, other, query_weight, column, partner, cos, sin, eps, NORMED, HEAD_DIM)
        mixed = tl.zeros((ROWS, HEAD_DIM), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        highest = tl.full((ROWS,), float("-inf"), tl.float32)
        if (last_page == count) & (position >= 0):
            # The last share begins with the new token, straight from the product. Every row of its tiles is the same.
            new = token + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
            key, key_partner = tl.load(new + column), tl.load(new + partner)
            value = tl.load(new + KV_HEADS * HEAD_DIM + column)
            key = rotated(key, key_partner, key_weight, column, partner, cos, sin, eps, NORMED, HEAD_DIM)
            newest = tl.load(pages + position // PAGE_SIZE)
            mixed, total, highest = begin_with_new(
                query, key, value, key_cache, value_cache, newest, position, kv_head, scale_log2, KV_HEADS, PAGE_SIZE
            )
        last = tl.minimum(last_page * PAGE_SIZE, position)
        # A page's number is loaded one block ahead of its keys, whose addresses wait for it.
        for start in range(first_page * PAGE_SIZE, last, BLOCK_KEYS):
            following = start + BLOCK_KEYS
            following_page = tl.load(pages + following // PAGE_SIZE, following < last, other=0)
            base = (page * PAGE_SIZE + start % PAGE_SIZE) * (KV_HEADS * HEAD_DIM)
            filled = start + block < last
            keys = tl.load(key_cache + base + within, filled[:, None], other=0.0)
            values = tl.load(value_cache + base + within, filled[:, None], other=0.0)
            mixed, total, highest = attend_block(
                query, keys, values, filled[None, :], mixed, total, highest, scale_log2, MASKED=True
            )
            page = following_page

        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]  # padding has seen nothing
        if last_page - first_page == count:
            place = (sequence.to(tl.int64) * KV_HEADS + kv_head) * GROUP + member
            tl.store(out + place[:, None] * HEAD_DIM + dims[None, :], mixed.to(out.dtype.element_ty), in_group)
        else:
            first_lane = ((origin + 1) * lanes - 1) // total_pages
            shares = ((origin + count) * lanes - 1) // total_pages - first_lane + 1
            pair, rows_from = sequence * KV_HEADS + kv_head, ((first_lane + sequence) * KV_HEADS + kv_head) * GROUP
            hand_in(
                *(out, partial, weights, arrivals, mixed, total, highest, pair, lane - first_lane, shares, rows_from),
                *(1, KV_HEADS * GROUP, ROWS, GROUP, HEAD_DIM, 4),
            )
        origin += count
        sequence += 1
        position, row, page = next_position, next_row, next_page


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    width = (model.heads + 2 * model.kv_heads) * model.head_dim
    qkv = torch.empty(64, width, dtype=dtype, device="meta")
    out = torch.empty(64, model.heads, model.head_dim, dtype=dtype, device="meta")
    page_table = torch.empty(64, 640, dtype=torch.int64, device="meta")
    rotary = torch.empty(4096, model.head_dim, device="meta")
    column = page_table[:, 0]

    def case(norms: HeadNorms | None, kind: torch.dtype) -> CompileCase:
        cache = torch.empty(128, model.page_size, model.kv_heads, model.head_dim, dtype=kind, device="meta")
        given = qkv, norms, rotary, column, cache, cache, page_table, column
        return lambda: decode_in_lanes(
            *given, 1.0, out, lane_count(64, model.kv_heads, model.head_dim, qkv.device) or 1
        )

    norms = HeadNorms(qkv[0], qkv[0], 1e-6)
    in_fp8 = [case(norms, FP8)] if capability(qkv.device) >= FP8_CAPABILITY else []
    return [case(norms, dtype), case(None, dtype), *in_fp8]
