"""FP8 products in tiles, in the forms of tiled_product.py: scales, gate and addition on the way out.

Beside a sum that is split where tiles are too few for the processors, this saves what torch's scaled product leaves to
kernels of their own: reading and writing the product once more to gate it, or to add it to the residual.

On Hopper the tensor cores keep about 13 bits of a sum of e4m3 products, an error far below that of e4m3 itself.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from meltcore.kernels.capability import shared_bytes
from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY
from meltcore.kernels.fp8_quantise import Fp8Rows
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps, prefetch
from meltcore.kernels.product_tiles import gated_pairs, room_for_shares, source_of, sum_of_shares, tile_sums

LEAST_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
# Divides a share of the columns, so that no load needs a mask on columns.
COLUMN_MULTIPLE = 64
# Beyond, torch's product is as fast together with the kernels for what stands around it.
MAX_TOKENS = 2048
_FEW_ROWS = 2048


def suits_fp8_tiles(hidden: torch.Tensor, weight: Fp8Rows) -> bool:
    """Up to MAX_TOKENS tokens, in rows of whole tiles."""
    return 1 <= hidden.shape[0] <= MAX_TOKENS and weight.values.shape[1] % COLUMN_MULTIPLE == 0


@triton.jit(do_not_specialize=["tokens"])
def _fp8_tiles_kernel(
    values_ptr,
    token_scales_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    partial_ptr,
    arrivals_ptr,
    tokens,
    OUTPUT: tl.constexpr,
    INPUT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one share of the columns, ROWS rows of the weight, TOKENS tokens; as _tiled_product_kernel."""
    WIDTH: tl.constexpr = INPUT // SHARES
    PLACES: tl.constexpr = ROWS // 2 if GATED else ROWS
    share = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    source = source_of(row, OUTPUT, GATED)
    rows_ptr = weight_ptr + source.to(tl.int64)[:, None] * INPUT + share * WIDTH
    scales = tl.load(scales_ptr + source)
    if OVERLAP:
        for start in tl.static_range(0, WIDTH, 128):
            prefetch(rows_ptr + start)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = tl.arange(0, COLUMNS)[None, :]
    existing = token % tokens
    tokens_ptr = values_ptr + existing.to(tl.int64)[:, None] * INPUT + share * WIDTH
    token_scales = tl.load(token_scales_ptr + existing)
    column = tl.program_id(1) * PLACES + tl.arange(0, PLACES)
    output = output_ptr + token.to(tl.int64)[:, None] * OUTPUT + column[None, :]
    inside = (token < tokens)[:, None] & (column < OUTPUT)[None, :]
    if ADDED:
        residual = tl.load(output, mask=inside, other=0.0)
    totals = tile_sums(rows_ptr, tokens_ptr, step, WIDTH, TOKENS, ROWS, COLUMNS, STAGES)
    if SHARES > 1:
        tile = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
        last, totals = sum_of_shares(totals, partial_ptr, arrivals_ptr, tile, share, SHARES)
        if not last:
            return
    if ROWS >= TOKENS:
        totals = tl.trans(totals)
    totals = totals * token_scales[:, None] * scales[None, :]
    if GATED:
        totals = gated_pairs(totals)
    if ADDED:
        totals += residual.to(tl.float32)
    tl.store(output, totals, mask=inside)


class Fp8TileLaunch(NamedTuple):
    """How a product is cut up. tokens, rows: of a tile; columns: of a step of the loop; shares: of the sum."""

    tokens: int
    rows: int
    columns: int
    shares: int
    stages: int
    warps: int

    @classmethod
    def of(cls, tokens: int, rows: int, input_size: int, shared_bytes: int) -> Fp8TileLaunch:
        """rows: of the weight; shared_bytes: that a program may have, for up to 4 steps under way.

        The best of a sweep over the four products of a Qwen3-0.6B layer (H200, 2026-11-21).
        """
        shares = 1
        if rows <= _FEW_ROWS:
            if tokens <= 512:
                tile, tile_rows = (32 if tokens <= 32 else 64), (32 if 32 < tokens <= 64 else 64)
            else:
                tile, tile_rows = 128, 128
            if input_size > 2048 and tokens <= 128:
                # Tiles too few for the processors, with much to sum.
                shares = 4 if tokens <= 64 else 2
        elif tokens <= 128:
            tile, tile_rows = triton.next_power_of_2(max(32, tokens)), 64
        else:
            tile, tile_rows = (128 if tokens <= 512 or shared_bytes < 2**17 else 256), 128
        columns = 128 if input_size % (128 * shares) == 0 else 64
        if input_size % (columns * shares):
            shares = 1
        stages = min(4, shared_bytes // ((tile + tile_rows) * columns))
        return cls(tile, tile_rows, columns, shares, stages, 8 if tile == 256 else 4)


def fp8_tiles(
    tokens: Fp8Rows,
    weight: Fp8Rows,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    launch: Fp8TileLaunch | None = None,
) -> torch.Tensor:
    """As `tiled_product`, of tokens that are quantised; the result is of `dtype`."""
    count, input_size = tokens.values.shape
    rows, device = weight.values.shape[0], weight.values.device
    output_size = rows // 2 if gated else rows
    output = residual
    if output is None:
        output = torch.empty(count, output_size, dtype=dtype, device=device)
    launch = launch or Fp8TileLaunch.of(count, rows, input_size, shared_bytes(device))
    grid = (launch.shares, triton.cdiv(rows, launch.rows), triton.cdiv(count, launch.tokens))
    partial_sums = arrivals = output  # unused where there is nothing to add up
    if launch.shares > 1:
        partial_sums, arrivals = room_for_shares(grid, launch.rows * launch.tokens, device)
    overlap = overlaps(device)
    options = {"num_warps": launch.warps} | ({"launch_pdl": True} if overlap else {})
    _fp8_tiles_kernel[grid](
        tokens.values,
        tokens.scales,
        weight.values,
        weight.scales,
        output,
        partial_sums,
        arrivals,
        count,
        OUTPUT=output_size,
        INPUT=input_size,
        TOKENS=launch.tokens,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        SHARES=launch.shares,
        STAGES=launch.stages,
        GATED=gated,
        ADDED=residual is not None,
        OVERLAP=overlap,
        **options,
    )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    attention_size = model.heads * model.head_dim

    def rows(count: int, size: int) -> Fp8Rows:
        return Fp8Rows(torch.empty(count, size, dtype=FP8, device="meta"), torch.empty(count, device="meta"))

    def case(count: int, output_size: int, input_size: int, *, gated: bool = False, added: bool = False) -> CompileCase:
        residual = torch.empty(count, output_size, dtype=kind, device="meta") if added else None
        tokens, weight = rows(count, input_size), rows(output_size, input_size)
        return partial(fp8_tiles, tokens, weight, kind, gated=gated, residual=residual)

    return [
        make
        for count in (24, 64, 128, 2048)
        for make in (
            case(count, attention_size + 2 * model.kv_heads * model.head_dim, model.hidden_size),
            case(count, model.hidden_size, attention_size, added=True),
            case(count, 2 * model.intermediate_size, model.hidden_size, gated=True),
            case(count, model.hidden_size, model.intermediate_size, added=True),
        )
    ]
