"""Products of a few tokens with a weight matrix, in Triton: they take as long as the weights take to be read.

For a handful of tokens a general matrix product spends most of its time waiting: it has too few programs, splits the
sum over launches, or asks for too little at once. Here a program owns a few rows of the weight and holds all of them in
registers. It asks for them before the kernel in front has ended (see overlap.py). With one token, what stands around a
product in a block, the norm before it and the activation or the addition after it, is done on the way; with more, only
the addition is. Sums are float32, in a fixed order.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm
from meltcore.kernels.overlap import overlaps

# One side of a tensor core's product: more tokens would need a second pass.
MAX_TOKENS = 16
# Divides input_size, so that no load needs a mask on columns and every row starts on a cache line.
COLUMN_MULTIPLE = 64
# A program holds all the columns of its rows, and of every token, at once: 16 tokens of this many are 96 KiB of shared
# memory, where sm_86, sm_89 and sm_120 give a program 99.
MAX_INPUT = 3072


def suits_few_tokens(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Up to MAX_TOKENS tokens of a 16-bit type, in rows that can be held at once and read 16 bytes at a time."""
    return (
        1 <= hidden.shape[0] <= MAX_TOKENS
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] <= MAX_INPUT
        and weight.shape[1] % COLUMN_MULTIPLE == 0
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )


def suits_one_token(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    return hidden.shape[0] == 1 and suits_few_tokens(hidden, weight)


@triton.jit
def _read(start_ptr, INPUT: tl.constexpr, STEP: tl.constexpr):
    """What lies at `start_ptr` and every STEP columns on: a tuple, so that all of it is asked for at once."""
    blocks = ()
    for start in tl.static_range(0, INPUT, STEP):
        blocks += (tl.load(start_ptr + start),)  # type: ignore[assignment]
    return blocks


@triton.jit
def _silu(gate):
    return gate / (1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=["output_size"])
def _one_token_kernel(
    hidden_ptr,
    norm_ptr,
    weight_ptr,
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
):
    """One program: ROWS outputs of the one token. The norm's factor is taken with the sum and applied after it."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    # Rows past the end repeat the last one: cheaper than a mask on every load.
    rows_ptr = weight_ptr + tl.minimum(row, output_size - 1).to(tl.int64)[:, None] * INPUT + column
    weights = _read(rows_ptr, INPUT, COLUMNS)
    if GATED:
        up_weights = _read(rows_ptr + output_size.to(tl.int64) * INPUT, INPUT, COLUMNS)
    if NORMED:
        norms = _read(norm_ptr + column, INPUT, COLUMNS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    hiddens = _read(hidden_ptr + column, INPUT, COLUMNS)
    if ADDED:
        residual = tl.load(output_ptr + row, mask=row < output_size, other=0.0)
    totals = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    squares = tl.zeros((1, COLUMNS), dtype=tl.float32)
    for step in tl.static_range(INPUT // COLUMNS):
        hidden = hiddens[step].to(tl.float32)
        if NORMED:
            squares += hidden * hidden
            hidden *= norms[step].to(tl.float32)
        totals += weights[step].to(tl.float32) * hidden
        if GATED:
            ups += up_weights[step].to(tl.float32) * hidden
    result = tl.sum(totals, axis=1)
    if NORMED:
        factor = tl.rsqrt(tl.sum(squares, axis=1) / INPUT + eps)
        result *= factor
        if GATED:
            result = _silu(result) * (tl.sum(ups, axis=1) * factor)
    elif GATED:
        result = _silu(result) * tl.sum(ups, axis=1)
    if ADDED:
        result += residual.to(tl.float32)
    tl.store(output_ptr + row, result, mask=row < output_size)


@triton.jit(do_not_specialize=["tokens", "output_size"])
def _few_tokens_kernel(
    hidden_ptr,
    weight_ptr,
    output_ptr,
    tokens,
    output_size,
    INPUT: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SHARES: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS outputs of every token. Each warp sums its own share of the columns.

    Tokens are the side of the product that the hardware pads to 16, so that ROWS can be as few as 8.
    """
    STEP: tl.constexpr = SHARES * COLUMNS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = (tl.arange(0, SHARES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])[:, None, :]
    rows_ptr = weight_ptr + tl.minimum(row, output_size - 1).to(tl.int64)[None, :, None] * INPUT + column
    weights = _read(rows_ptr, INPUT, STEP)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Tokens past the end repeat the last one, as rows do, and are not stored.
    hiddens = _read(hidden_ptr + tl.minimum(token, tokens - 1)[None, :, None] * INPUT + column, INPUT, STEP)
    output = output_ptr + token[:, None].to(tl.int64) * output_size + row[None, :]
    inside = (token < tokens)[:, None] & (row < output_size)[None, :]
    if ADDED:
        residual = tl.load(output, mask=inside, other=0.0)
    totals = tl.zeros((SHARES, TOKENS, ROWS), dtype=tl.float32)
    for step in tl.static_range(INPUT // STEP):
        totals = tl.dot(hiddens[step], tl.permute(weights[step], (0, 2, 1)), totals)
    result = tl.sum(totals, axis=0)
    if ADDED:
        result += residual.to(tl.float32)
    tl.store(output, result, mask=inside)


class FewTokensLaunch(NamedTuple):
    """What one program covers. columns: read in one piece, over all warps; a power of two that divides input_size."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def of(cls, tokens: int, output_size: int, input_size: int) -> FewTokensLaunch:
        """Programs enough for every processor, few enough that all of them run at once.

        Measured in a chain of 28 layers of Qwen3-0.6B (H200, benchmarks/notes/products.md).
        """
        if tokens == 1:
            launch = cls(8, 1024, 2) if output_size > 2048 else cls(4, 1024, 4)
        else:
            launch = cls(16, 512, 4)
        return launch._replace(columns=min(launch.columns, input_size & -input_size))


def one_token(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    launch: FewTokensLaunch | None = None,
) -> torch.Tensor:
    """hidden [1, input_size], normalised if `norm` is given, times weight transposed: [1, output_size].

    gated: weight is that of the gate above that of what it gates, and the result silu(gate) * up, half as wide.
    residual: [1, output_size], contiguous; the product is added to it, and it is what is returned.
    The weight is read before earlier kernels have ended: it must not be what the one just before wrote.
    """
    input_size = hidden.shape[1]
    output_size = weight.shape[0] // 2 if gated else weight.shape[0]
    output = residual
    if output is None:
        output = torch.empty(1, output_size, dtype=hidden.dtype, device=hidden.device)
    launch = launch or FewTokensLaunch.of(1, output_size, input_size)
    overlap = overlaps(hidden.device)
    norm_weight, eps = norm or (weight, 0.0)
    _one_token_kernel[(triton.cdiv(output_size, launch.rows),)](
        hidden,
        norm_weight,
        weight,
        output,
        output_size,
        eps,
        INPUT=input_size,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        NORMED=norm is not None,
        GATED=gated,
        ADDED=residual is not None,
        OVERLAP=overlap,
        num_warps=launch.warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


def few_tokens(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    launch: FewTokensLaunch | None = None,
) -> torch.Tensor:
    """hidden [tokens, input_size] times weight transposed: [tokens, output_size]; added to `residual` if it is given.

    residual: [tokens, output_size], contiguous, is what is returned then. For the weight see `one_token`.
    """
    tokens, input_size = hidden.shape
    output_size = weight.shape[0]
    output = residual
    if output is None:
        output = torch.empty(tokens, output_size, dtype=hidden.dtype, device=hidden.device)
    launch = launch or FewTokensLaunch.of(MAX_TOKENS, output_size, input_size)
    overlap = overlaps(hidden.device)
    _few_tokens_kernel[(triton.cdiv(output_size, launch.rows),)](
        hidden,
        weight,
        output,
        tokens,
        output_size,
        INPUT=input_size,
        TOKENS=MAX_TOKENS,
        ROWS=launch.rows,
        SHARES=launch.warps,
        COLUMNS=launch.columns // launch.warps,
        ADDED=residual is not None,
        OVERLAP=overlap,
        num_warps=launch.warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    attention_size = model.heads * model.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    hidden, mixed = empty(MAX_TOKENS, model.hidden_size), empty(MAX_TOKENS, attention_size)
    gated = empty(MAX_TOKENS, model.intermediate_size)
    norm = Norm(empty(model.hidden_size), 1e-6)
    qkv = empty(attention_size + 2 * model.kv_heads * model.head_dim, model.hidden_size)
    output, down = empty(model.hidden_size, attention_size), empty(model.hidden_size, model.intermediate_size)
    gate_up, head = empty(2 * model.intermediate_size, model.hidden_size), empty(151936, model.hidden_size)
    every = [
        partial(one_token, hidden[:1], qkv, norm),
        partial(one_token, mixed[:1], output, residual=hidden[:1]),
        partial(one_token, hidden[:1], gate_up, norm, gated=True),
        partial(one_token, gated[:1], down, residual=hidden[:1]),
        partial(one_token, hidden[:1], head),
        partial(few_tokens, mixed, output, residual=hidden),
        partial(few_tokens, gated, down, residual=hidden),
    ]
    return [case for case in every if suits_few_tokens(*case.args[:2])]
