"""Products of a few tokens with an FP8 weight matrix: `few_tokens`, with half as much to read.

A program quantises the tokens itself, to the same values as `quantise`, whose kernel would take as long as the product.
The products of e4m3 numbers are exact in float16 factors and float32 sums, so that is how they are computed: reading
is what takes the time. Scales are applied to the sums.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import torch

from meltcore.kernels.few_tokens import COLUMN_MULTIPLE, MAX_TOKENS, FewTokensLaunch, _read, _silu
from meltcore.kernels.fp8_quantise import FP8, LARGEST, LEAST, Fp8Rows, row_scale
from meltcore.kernels.fp8_quantise import LEAST_CAPABILITY as LEAST_CAPABILITY  # of this file's kernels too
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm
from meltcore.kernels.overlap import overlaps

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


@triton.jit
def _normalised(hiddens, norms, squares_sum, eps, dtype: tl.constexpr, INPUT: tl.constexpr, STEPS: tl.constexpr):
    """Rounded where the norm's own kernel rounds, so that the same values are quantised."""
    factor = tl.rsqrt(squares_sum / INPUT + eps)
    results = ()
    for step in tl.static_range(STEPS):
        scaled = (hiddens[step].to(tl.float32) * factor).to(dtype).to(tl.float32)
        results += ((scaled * norms[step].to(tl.float32)).to(dtype),)  # type: ignore[assignment]
    return results


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
    weights = _read(rows_ptr, INPUT, COLUMNS)
    scales = tl.load(scales_ptr + existing)
    if GATED:
        up_weights = _read(rows_ptr + output_size.to(tl.int64) * INPUT, INPUT, COLUMNS)
        up_scales = tl.load(scales_ptr + output_size + existing)
    if NORMED:
        norms = _read(norm_ptr + column, INPUT, COLUMNS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    hiddens = _read(hidden_ptr + column, INPUT, COLUMNS)
    if ADDED:
        residual = tl.load(output_ptr + row, mask=row < output_size, other=0.0)
    if NORMED:
        squares = tl.zeros((1, COLUMNS), dtype=tl.float32)
        for step in tl.static_range(STEPS):
            squares += hiddens[step].to(tl.float32) * hiddens[step].to(tl.float32)
        total = tl.sum(squares, axis=1)[:, None]
        hiddens = _normalised(hiddens, norms, total, eps, hidden_ptr.dtype.element_ty, INPUT, STEPS)
    largest = tl.zeros((1, COLUMNS), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        largest = tl.maximum(largest, tl.abs(hiddens[step].to(tl.float32)))
    token_scale = row_scale(tl.max(largest, axis=1), LARGEST, LEAST)
    totals = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        hidden = tl.div_rn(hiddens[step].to(tl.float32), token_scale[:, None])
        hidden = hidden.to(tl.float8e4nv).to(tl.float32)
        totals += weights[step].to(tl.float32) * hidden
        if GATED:
            ups += up_weights[step].to(tl.float32) * hidden
    result = tl.sum(totals, axis=1) * token_scale * scales
    if GATED:
        result = _silu(result) * (tl.sum(ups, axis=1) * token_scale * up_scales)
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
    hidden_ptr,
    norm_ptr,
    weight_ptr,
    scales_ptr,
    output_ptr,
    tokens,
    output_size,
    eps,
    INPUT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARES: tl.constexpr,
    COLUMNS: tl.constexpr,
    NORMED: tl.constexpr,
    GATED: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
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
    weights = _read(rows_ptr, INPUT, STEP)
    scales = tl.load(scales_ptr + existing)[None, :]
    if GATED:
        up_weights = _read(rows_ptr + output_size.to(tl.int64) * INPUT, INPUT, STEP)
        up_scales = tl.load(scales_ptr + output_size + existing)[None, :]
    if NORMED:
        norms = _read(norm_ptr + column, INPUT, STEP)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Tokens past the end repeat the last one, as rows do, and are not stored.
    tokens_ptr = hidden_ptr + tl.minimum(token, tokens - 1)[None, :, None] * INPUT + column
    output = output_ptr + token[:, None].to(tl.int64) * output_size + row[None, :]
    inside = (token < tokens)[:, None] & (row < output_size)[None, :]
    if ADDED:
        residual = tl.load(output, mask=inside, other=0.0)
    hiddens = _read(tokens_ptr, INPUT, STEP)
    if NORMED:
        squares = tl.zeros((SHARES, TOKENS), dtype=tl.float32)
        for step in tl.static_range(STEPS):
            squares += tl.sum(hiddens[step].to(tl.float32) * hiddens[step].to(tl.float32), axis=2)
        total = tl.sum(squares, axis=0)[None, :, None]
        hiddens = _normalised(hiddens, norms, total, eps, hidden_ptr.dtype.element_ty, INPUT, STEPS)
    largest = tl.zeros((SHARES, TOKENS), dtype=tl.float32)
    for step in tl.static_range(STEPS):
        largest = tl.maximum(largest, tl.max(tl.abs(hiddens[step].to(tl.float32)), axis=2))
    token_scale = row_scale(tl.max(largest, axis=0), LARGEST, LEAST)
    quantised = ()
    for step in tl.static_range(STEPS):
        shared = tl.div_rn(hiddens[step].to(tl.float32), token_scale[None, :, None])
        quantised += (shared.to(tl.float8e4nv),)  # type: ignore[assignment]
    result = _fp8_products(quantised, weights, STEPS, SHARES, TOKENS, ROWS) * token_scale[:, None] * scales
    if GATED:
        ups = _fp8_products(quantised, up_weights, STEPS, SHARES, TOKENS, ROWS)
        result = _silu(result) * (ups * token_scale[:, None] * up_scales)
    if ADDED:
        result += residual.to(tl.float32)
    tl.store(output, result, mask=inside)


def fp8_launch(tokens: int, output_size: int, input_size: int) -> FewTokensLaunch:
    """As FewTokensLaunch.of, for rows of half as many bytes, and tokens that have to be held twice."""
    if tokens == 1:
        return FewTokensLaunch.of(tokens, output_size, input_size)
    return FewTokensLaunch(8, min(512, input_size & -input_size), 8 if input_size % 128 == 0 else 4)


def fp8_few_tokens(
    hidden: torch.Tensor,
    weight: Fp8Rows,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    launch: FewTokensLaunch | None = None,
) -> torch.Tensor:
    """As `few_tokens`: norm before, a gate or an addition after the product, and weights that are read early."""
    tokens, input_size = hidden.shape
    output_size = weight.values.shape[0] // 2 if gated else weight.values.shape[0]
    output = residual
    if output is None:
        output = torch.empty(tokens, output_size, dtype=hidden.dtype, device=hidden.device)
    launch = launch or fp8_launch(tokens, output_size, input_size)
    overlap = overlaps(hidden.device)
    forms = {"NORMED": norm is not None, "GATED": gated, "ADDED": residual is not None, "OVERLAP": overlap}
    options = {"num_warps": launch.warps} | ({"launch_pdl": True} if overlap else {})
    norm_weight, eps = norm or (hidden, 0.0)
    grid = (triton.cdiv(output_size, launch.rows),)
    if tokens == 1:
        _fp8_one_token_kernel[grid](
            hidden,
            norm_weight,
            weight.values,
            weight.scales,
            output,
            output_size,
            eps,
            INPUT=input_size,
            ROWS=launch.rows,
            COLUMNS=launch.columns,
            LARGEST=LARGEST,
            LEAST=LEAST,
            **forms,
            **options,
        )
    else:
        _fp8_few_tokens_kernel[grid](
            hidden,
            norm_weight,
            weight.values,
            weight.scales,
            output,
            tokens,
            output_size,
            eps,
            INPUT=input_size,
            TOKENS=MAX_TOKENS,
            ROWS=launch.rows,
            SHARES=launch.warps,
            COLUMNS=launch.columns // launch.warps,
            LARGEST=LARGEST,
            LEAST=LEAST,
            **forms,
            **options,
        )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    attention_size = model.heads * model.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def matrix(output_size: int, input_size: int) -> Fp8Rows:
        values = torch.empty(output_size, input_size, dtype=FP8, device="meta")
        return Fp8Rows(values, torch.empty(output_size, device="meta"))

    def cases(tokens: int) -> list[CompileCase]:
        hidden, mixed = empty(tokens, model.hidden_size), empty(tokens, attention_size)
        gated = empty(tokens, model.intermediate_size)
        norm = Norm(empty(model.hidden_size), 1e-6)
        qkv = matrix(attention_size + 2 * model.kv_heads * model.head_dim, model.hidden_size)
        output, down = matrix(model.hidden_size, attention_size), matrix(model.hidden_size, model.intermediate_size)
        gate_up = matrix(2 * model.intermediate_size, model.hidden_size)
        return [
            lambda: fp8_few_tokens(hidden, qkv, norm),
            lambda: fp8_few_tokens(mixed, output, residual=hidden),
            lambda: fp8_few_tokens(hidden, gate_up, norm, gated=True),
            lambda: fp8_few_tokens(gated, down, residual=hidden),
        ]

    return cases(1) + cases(MAX_TOKENS)
