"""Products of a few tokens with an FP8 weight matrix, one (as one_token.py does) or several at once.

One token is quantised inside, to the same values as by `quantise`, whose kernel would take as long as the product.
Several come quantised: every program would do all of them again. The products of e4m3 numbers are exact as products of
float16 in float32 sums, and so they are computed: reading is what takes the time. Scales are applied to the sums.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial

import torch

from meltcore.kernels.fp8 import FP8, FP8_CAPABILITY, LARGEST
from meltcore.kernels.fp8_quantise import LEAST, Fp8Rows
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm
from meltcore.kernels.one_token import COLUMN_MULTIPLE, RowsLaunch, read_columns, silu
from meltcore.kernels.overlap import overlaps

LEAST_CAPABILITY = FP8_CAPABILITY  # of this file's kernels
# One side of a tensor core's product: more tokens would need a second pass.
MAX_TOKENS = 16
# A program holds all the columns of its rows, and of every token, in registers at once.
MAX_INPUT = 3072


def suits_fp8_few_tokens(hidden: torch.Tensor, weight: Fp8Rows) -> bool:
    """Up to MAX_TOKENS tokens of a 16-bit type, in rows that can be held at once and read 16 bytes at a time."""
    return (
        1 <= hidden.shape[0] <= MAX_TOKENS
        and hidden.shape[1] <= MAX_INPUT
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.values.shape[1] % COLUMN_MULTIPLE == 0
        and hidden.is_contiguous()
    )


@triton.jit(do_not_specialize=["output_size"])
def _fp8_one_token_kernel(
    hidden_ptr,
    norm_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    output_size,
    eps,
    INPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One program: ROWS outputs of the one token."""
    STEPS: tl.constexpr = INPUT // COLUMNS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    # Rows past the end repeat the last one: cheaper than a mask on every load.
    existing = tl.minimum(row, output_size - 1)
    rows_ptr = weight_ptr + existing.to(tl.int64)[:, None] * INPUT + column
    weights = read_columns(rows_ptr, INPUT, COLUMNS)
    scales = tl.load(scales_ptr + existing)
    if GATED:
        up_weights = read_columns(rows_ptr + output_size.to(tl.int64) * INPUT, INPUT, COLUMNS)
        up_scales = tl.load(scales_ptr + output_size + existing)
    if NORMED:
        norms = read_columns(norm_ptr + column, INPUT, COLUMNS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    hiddens = read_columns(hidden_ptr + column, INPUT, COLUMNS)
    if ADDED:
        residual = tl.load(output_ptr + row, mask=row < output_size, other=0.0)
    squares = tl.zeros((1, COLUMNS), dtype=tl.float32)
    largest = tl.zeros((1, COLUMNS), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        hidden = hiddens[step].to(tl.float32)
        squares += hidden * hidden
        if NORMED:
            hidden *= norms[step].to(tl.float32)
        largest = tl.maximum(largest, tl.abs(hidden))
    top = tl.maximum(tl.max(largest, axis=1), LEAST)
    token_scale = tl.div_rn(top, LARGEST)
    if NORMED:
        token_scale *= tl.rsqrt(tl.sum(squares, axis=1) / INPUT + eps)
    widen = tl.div_rn(LARGEST, top)[:, None]
    totals = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        hidden = hiddens[step].to(tl.float32)
        if NORMED:
            hidden *= norms[step].to(tl.float32)
        hidden = (hidden * widen).to(tl.float8e4nv).to(tl.float32)
        totals += weights[step].to(tl.float32) * hidden
        if GATED:
            ups += up_weights[step].to(tl.float32) * hidden
    result = tl.sum(totals, axis=1) * token_scale * scales
    if GATED:
        result = silu(result) * (tl.sum(ups, axis=1) * token_scale * up_scales)
    if ADDED:
        result += residual.to(tl.float32)
    tl.store(output_ptr + row, result, mask=row < output_size)


@triton.jit
def _fp8_products(
    hiddens, weights, STEPS: tl.constexpr, SHARES: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr
):
    """[TOKENS, ROWS] float32. Each warp sums its own share of the columns, by batched products."""
    totals = tl.zeros((SHARES, TOKENS, ROWS), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        weight = tl.permute(weights[step].to(tl.float16), (0, 2, 1))
        totals = tl.dot(hiddens[step].to(tl.float16), weight, totals)
    return tl.sum(totals, axis=0)


@triton.jit(do_not_specialize=["tokens", "output_size"])
def _fp8_few_tokens_kernel(
    values_ptr,
    token_scales_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    tokens,
    output_size,
    INPUT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARES: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS outputs of every token.

    Tokens are the side of the product that the hardware pads to 16, so that ROWS can be as few as 8.
    """
    STEP: tl.constexpr = SHARES * COLUMNS
    STEPS: tl.constexpr = INPUT // STEP
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = (tl.arange(0, SHARES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])[:, None, :]
    existing = tl.minimum(row, output_size - 1)
    rows_ptr = weight_ptr + existing.to(tl.int64)[None, :, None] * INPUT + column
    weights = read_columns(rows_ptr, INPUT, STEP)
    scales = tl.load(scales_ptr + existing)[None, :]
    if GATED:
        up_weights = read_columns(rows_ptr + output_size.to(tl.int64) * INPUT, INPUT, STEP)
        up_scales = tl.load(scales_ptr + output_size + existing)[None, :]
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Tokens past the end repeat the last one, as rows do, and are not stored.
    chosen = tl.minimum(token, tokens - 1)
    values = read_columns(values_ptr + chosen[None, :, None] * INPUT + column, INPUT, STEP)
    token_scales = tl.load(token_scales_ptr + chosen)[:, None]
    output = output_ptr + token[:, None].to(tl.int64) * output_size + row[None, :]
    inside = (token < tokens)[:, None] & (row < output_size)[None, :]
    if ADDED:
        residual = tl.load(output, mask=inside, other=0.0)
    result = _fp8_products(values, weights, STEPS, SHARES, TOKENS, ROWS) * token_scales * scales
    if GATED:
        ups = _fp8_products(values, up_weights, STEPS, SHARES, TOKENS, ROWS)
        result = silu(result) * (ups * token_scales * up_scales)
    if ADDED:
        result += residual.to(tl.float32)
    tl.store(output, result, mask=inside)


def one_token_launch(input_size: int) -> RowsLaunch:
    """The best of a sweep over the products of a Qwen3-0.6B layer (H200, 2026-11-21), as the next."""
    columns, warps = (512, 2) if input_size <= 2048 else (1024, 4)
    return RowsLaunch(4, min(columns, input_size & -input_size), warps)


def few_tokens_launch(rows: int, input_size: int) -> RowsLaunch:
    """rows: of the weight."""
    rows_together, columns = (8, 1024) if rows <= 2048 else (16, 512)
    return RowsLaunch(rows_together, min(columns, input_size & -input_size), 4)


def fp8_one_token(
    hidden: torch.Tensor,
    weight: Fp8Rows,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    launch: RowsLaunch | None = None,
) -> torch.Tensor:
    """As `one_token`: norm before, a gate or an addition after the product, and weights read early."""
    input_size = hidden.shape[1]
    output = _output(1, weight, hidden.dtype, gated, residual)
    launch = launch or one_token_launch(input_size)
    overlap = overlaps(hidden.device)
    options = {"num_warps": launch.warps} | ({"launch_pdl": True} if overlap else {})
    norm_weight, eps = norm or (hidden, 0.0)
    _fp8_one_token_kernel[(triton.cdiv(output.shape[1], launch.rows),)](
        hidden,
        norm_weight,
        weight.values,
        weight.scales,
        output,
        output.shape[1],
        eps,
        INPUT=input_size,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        NORMED=norm is not None,
        GATED=gated,
        ADDED=residual is not None,
        OVERLAP=overlap,
        LARGEST=LARGEST,
        LEAST=LEAST,
        **options,
    )
    return output


def fp8_few_tokens(
    tokens: Fp8Rows,
    weight: Fp8Rows,
    dtype: torch.dtype,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    launch: RowsLaunch | None = None,
) -> torch.Tensor:
    """Products of up to MAX_TOKENS tokens that are quantised already; the result is of `dtype`."""
    count, input_size = tokens.values.shape
    output = _output(count, weight, dtype, gated, residual)
    launch = launch or few_tokens_launch(weight.values.shape[0], input_size)
    overlap = overlaps(tokens.values.device)
    options = {"num_warps": launch.warps} | ({"launch_pdl": True} if overlap else {})
    _fp8_few_tokens_kernel[(triton.cdiv(output.shape[1], launch.rows),)](
        tokens.values,
        tokens.scales,
        weight.values,
        weight.scales,
        output,
        count,
        output.shape[1],
        INPUT=input_size,
        TOKENS=MAX_TOKENS,
        ROWS=launch.rows,
        SHARES=launch.warps,
        COLUMNS=launch.columns // launch.warps,
        GATED=gated,
        ADDED=residual is not None,
        OVERLAP=overlap,
        **options,
    )
    return output


def _output(
    tokens: int, weight: Fp8Rows, dtype: torch.dtype, gated: bool, residual: torch.Tensor | None
) -> torch.Tensor:
    """The residual [tokens, output_size] where there is one, or as much new memory."""
    if residual is not None:
        return residual
    output_size = weight.values.shape[0] // (2 if gated else 1)
    return torch.empty(tokens, output_size, dtype=dtype, device=weight.values.device)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    attention_size = model.heads * model.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def rows(count: int, size: int) -> Fp8Rows:
        return Fp8Rows(torch.empty(count, size, dtype=FP8, device="meta"), torch.empty(count, device="meta"))

    qkv = rows(attention_size + 2 * model.kv_heads * model.head_dim, model.hidden_size)
    output, down = rows(model.hidden_size, attention_size), rows(model.hidden_size, model.intermediate_size)
    gate_up = rows(2 * model.intermediate_size, model.hidden_size)
    norm = Norm(empty(model.hidden_size), 1e-6)
    hidden, mixed, inner = empty(1, model.hidden_size), empty(1, attention_size), empty(1, model.intermediate_size)

    def several(count: int) -> list[CompileCase]:
        residual = empty(count, model.hidden_size)
        return [
            partial(fp8_few_tokens, rows(count, model.hidden_size), qkv, kind),
            partial(fp8_few_tokens, rows(count, attention_size), output, kind, residual=residual),
            partial(fp8_few_tokens, rows(count, model.hidden_size), gate_up, kind, gated=True),
            partial(fp8_few_tokens, rows(count, model.intermediate_size), down, kind, residual=residual),
        ]

    return [
        partial(fp8_one_token, hidden, qkv, norm),
        partial(fp8_one_token, mixed, output, residual=hidden),
        partial(fp8_one_token, hidden, gate_up, norm, gated=True),
        partial(fp8_one_token, inner, down, residual=hidden),
        *several(MAX_TOKENS),
    ]
