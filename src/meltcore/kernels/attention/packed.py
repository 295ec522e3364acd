"""Attention and pooling over rows of different lengths that lie one after another without padding.

Every token of a row attends to all tokens of the row, as in BERT (Devlin et al. 2018, arXiv:1810.04805). Shapes do not
depend on the lengths of the rows, so that one CUDA graph computes all batches of a number of tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync, use_triton

# Queries of a tile, keys of a step, warps and stages of the attention kernel, for heads of at most 128 values.
BLOCK_QUERIES, _BLOCK_KEYS, _WARPS, _STAGES = 64, 32, 4, 3
MAX_HEAD_DIM = 128
_POOLED_TOKENS, _POOLED_COLUMNS = 16, 128
_LOG2_E = 1.4426950408889634


def max_tiles(num_tokens: int, num_rows: int) -> int:
    """Return the largest number of tiles that `num_tokens` in at most `num_rows` rows can have."""
    return num_tokens // BLOCK_QUERIES + num_rows


def make_row_tiles(lengths: np.ndarray) -> np.ndarray:
    """Cut rows into tiles of at most BLOCK_QUERIES queries.

    Args:
        lengths: [rows] int32, the number of tokens of each row.

    Returns [1 + tiles, 3] int32: first the number of tiles, then the first query of each tile, the first token of its
    row and the end of its row. What follows these in a larger table is not read.
    """
    ends, counts = lengths.cumsum(), -(-lengths // BLOCK_QUERIES)
    offsets = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
    starts, ends = (ends - lengths).repeat(counts), ends.repeat(counts)
    tiles = np.stack([starts + offsets * BLOCK_QUERIES, starts, ends], axis=1)
    return np.concatenate([[[len(tiles), 0, 0]], tiles]).astype(np.int32)


def packed_attention_reference(qkv: torch.Tensor, tiles: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Compute `packed_attention` row by row."""
    output = torch.zeros_like(qkv[:, : qkv.shape[1] // 3])
    bounds = sorted({(start, end) for _, start, end in tiles[1 : 1 + int(tiles[0, 0])].tolist()})
    for start, end in bounds:
        query, key, value = qkv[start:end].view(end - start, 3, num_heads, -1).permute(1, 2, 0, 3)
        attended = functional.scaled_dot_product_attention(query, key, value)
        output[start:end] = attended.transpose(0, 1).flatten(1)
    return output


def packed_attention(qkv: torch.Tensor, tiles: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the attended values of all tokens of rows. Tokens that belong to no row get any value.

    Args:
        qkv: [tokens, 3 * size], contiguous: queries, keys and values, each with heads one after another.
        tiles: [1 + tiles, 3] int32 on the device of `qkv`, from `make_row_tiles`, or longer.
        num_heads: the number of heads, each of `size` / `num_heads` values, at most MAX_HEAD_DIM.

    Returns [tokens, size].
    """
    if not use_triton(qkv):
        return packed_attention_reference(qkv, tiles, num_heads)
    if not (qkv.is_contiguous() and tiles.is_contiguous()):
        raise ValueError("queries, keys and values, and tiles must be contiguous")
    num_tokens, head_dim = qkv.shape[0], qkv.shape[1] // (3 * num_heads)
    output = qkv.new_empty(num_tokens, num_heads * head_dim)
    # A program computes several tiles if rows are short: programs without a tile would take time, too.
    programs = min(len(tiles) - 1, -(-3 * num_tokens // (2 * BLOCK_QUERIES)))
    block_dim = max(16, triton.next_power_of_2(head_dim))
    if programs:
        _packed_attention_kernel[(programs, num_heads)](
            *(qkv, tiles, output, head_dim**-0.5 * _LOG2_E),
            SIZE=num_heads * head_dim,
            HEAD_DIM=head_dim,
            BLOCK_DIM=block_dim,
            BLOCK_QUERIES=BLOCK_QUERIES,
            BLOCK_KEYS=_BLOCK_KEYS,
            num_warps=_WARPS,
            num_stages=_STAGES,
            **pdl_options(qkv.device),
        )
    return output


def mean_of_rows(hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean of the hidden states of each row: [rows, size] float32.

    Args:
        hidden: [tokens, size], contiguous.
        rows: [2, rows], contiguous: the first token and the number of tokens of each row. A row without tokens gets
            any value.
    """
    if not use_triton(hidden):
        return torch.segment_reduce(hidden.float(), "mean", lengths=rows[1], unsafe=True)
    num_rows, size = rows.shape[1], hidden.shape[1]
    output = torch.empty(num_rows, size, dtype=torch.float32, device=hidden.device)
    if num_rows:
        _mean_of_rows_kernel[(num_rows, triton.cdiv(size, _POOLED_COLUMNS))](
            *(hidden, rows, output, num_rows),
            SIZE=size,
            BLOCK_TOKENS=_POOLED_TOKENS,
            BLOCK=_POOLED_COLUMNS,
            num_warps=4,
            **pdl_options(hidden.device),
        )
    return output


@triton.jit
def _attend(
    state,
    query,
    key_ptr,
    first,
    count,
    scale,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Attend to the keys [first, first + BLOCK_KEYS) of a row with `count` tokens, all of them if IS_WHOLE."""
    output, total, top = state
    keys, dims = first + tl.arange(0, BLOCK_KEYS), tl.arange(0, BLOCK_DIM)
    offset = keys[:, None] * (3 * SIZE) + dims[None, :]
    if IS_WHOLE and HEAD_DIM == BLOCK_DIM:
        key, value = tl.load(key_ptr + offset), tl.load(key_ptr + SIZE + offset)
    else:
        mask = (keys < count)[:, None] & (dims < HEAD_DIM)[None, :]
        key = tl.load(key_ptr + offset, mask=mask, other=0.0)
        value = tl.load(key_ptr + SIZE + offset, mask=mask, other=0.0)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if not IS_WHOLE:
        scores = tl.where((keys < count)[None, :], scores, float("-inf"))
    new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
    probabilities = tl.exp2(scores * scale - new_top[:, None])
    decay = tl.exp2(top - new_top)
    total = total * decay + tl.sum(probabilities, axis=1)
    output = tl.dot(probabilities.to(value.dtype), value, output * decay[:, None], input_precision="ieee")
    return output, total, new_top


@triton.jit
def _packed_attention_kernel(
    qkv_ptr,
    tiles_ptr,
    output_ptr,
    scale,
    SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes tiles of one head, as many apart as there are programs. `scale` is for powers of 2."""
    pdl_sync(PDL)
    head = tl.program_id(1) * HEAD_DIM
    dims = tl.arange(0, BLOCK_DIM)
    for tile in range(1 + tl.program_id(0), 1 + tl.load(tiles_ptr), tl.num_programs(0)):
        start = tl.load(tiles_ptr + 3 * tile + 1)
        count = tl.load(tiles_ptr + 3 * tile + 2) - start
        queries = tl.load(tiles_ptr + 3 * tile) - start + tl.arange(0, BLOCK_QUERIES)
        mask = (queries < count)[:, None] & (dims < HEAD_DIM)[None, :]
        row_ptr = qkv_ptr + start.to(tl.int64) * (3 * SIZE) + head
        query = tl.load(row_ptr + queries[:, None] * (3 * SIZE) + dims[None, :], mask=mask, other=0.0)
        state = (
            tl.zeros([BLOCK_QUERIES, BLOCK_DIM], dtype=tl.float32),
            tl.zeros([BLOCK_QUERIES], dtype=tl.float32),
            tl.full([BLOCK_QUERIES], float("-inf"), dtype=tl.float32),
        )
        whole = count // BLOCK_KEYS * BLOCK_KEYS
        for first in range(0, whole, BLOCK_KEYS):
            state = _attend(
                state, query, row_ptr + SIZE, first, count, scale, SIZE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, True
            )
        if whole < count:
            state = _attend(
                state, query, row_ptr + SIZE, whole, count, scale, SIZE, HEAD_DIM, BLOCK_DIM, BLOCK_KEYS, False
            )
        output = state[0] / state[1][:, None]
        offset = (start.to(tl.int64) + queries[:, None]) * SIZE + head + dims[None, :]
        tl.store(output_ptr + offset, output.to(output_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _mean_of_rows_kernel(
    hidden_ptr,
    rows_ptr,
    output_ptr,
    num_rows,
    SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK columns of one row."""
    pdl_sync(PDL)
    row = tl.program_id(0)
    count = tl.load(rows_ptr + num_rows + row)
    if count > 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        row_ptr = hidden_ptr + tl.load(rows_ptr + row).to(tl.int64) * SIZE
        total = tl.zeros([BLOCK_TOKENS, BLOCK], dtype=tl.float32)
        for first in range(0, count.to(tl.int32), BLOCK_TOKENS):
            tokens = first + tl.arange(0, BLOCK_TOKENS)
            mask = (tokens < count)[:, None] & (columns < SIZE)[None, :]
            total += tl.load(row_ptr + tokens[:, None] * SIZE + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        tl.store(output_ptr + row * SIZE + columns, tl.sum(total, axis=0) / count, mask=columns < SIZE)
