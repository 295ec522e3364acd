"""Products of one token with a weight matrix, in Triton: they take as long as the weights take to be read.

For one token a general matrix product spends most of its time waiting: it has too few programs, splits the sum over
launches, or asks for too little at once. Here a program owns a few rows of the weight and holds all of them in
registers. It asks for them before the kernel in front has ended (see overlap.py), and does what stands around a product
in a block on the way: the norm before it, and the activation or the addition after it. Sums are float32, in a fixed
order.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.norm import Norm
from meltcore.kernels.overlap import overlaps

# Divides input_size, so that no load needs a mask on columns and every row starts on a cache line.
COLUMN_MULTIPLE = 64
# A program holds all the columns of its rows at once, in registers.
MAX_INPUT = 4096


def suits_one_token(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """One token of a 16-bit type, in rows that can be held at once and read 16 bytes at a time."""
    return (
        hidden.shape[0] == 1
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] <= MAX_INPUT
        and weight.shape[1] % COLUMN_MULTIPLE == 0
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )


@triton.jit
def read_columns(start_ptr, INPUT: tl.constexpr, STEP: tl.constexpr):
    """What lies at `start_ptr` and every STEP columns on: a tuple, so that all of it is asked for at once."""
    blocks = ()
    for start in tl.static_range(0, INPUT, STEP):
        blocks += (tl.load(start_ptr + start),)  # type: ignore[assignment]
    return blocks


@triton.jit
def silu(gate):
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
    weights = read_columns(rows_ptr, INPUT, COLUMNS)
    if GATED:
        up_weights = read_columns(rows_ptr + output_size.to(tl.int64) * INPUT, INPUT, COLUMNS)
    if NORMED:
        norms = read_columns(norm_ptr + column, INPUT, COLUMNS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    hiddens = read_columns(hidden_ptr + column, INPUT, COLUMNS)
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
            result = silu(result) * (tl.sum(ups, axis=1) * factor)
    elif GATED:
        result = silu(result) * tl.sum(ups, axis=1)
    if ADDED:
        result += residual.to(tl.float32)
    tl.store(output_ptr + row, result, mask=row < output_size)


class RowsLaunch(NamedTuple):
    """What one program covers. columns: read in one piece, over all warps; a power of two that divides input_size."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def of(cls, output_size: int, input_size: int) -> RowsLaunch:
        """Programs enough for every processor, few enough that all of them run at once.

        Measured in a chain of 28 layers of Qwen3-0.6B, and for longer rows at Qwen3.5-35B-A3B's sizes, where sums over
        1,024 columns would not fit into registers beside the weights (H200, benchmarks/notes/products.md, experts.md).
        """
        launch = cls(4, 1024, 4)
        if output_size > 2048:
            launch = cls(8, 1024, 2) if input_size <= 1024 else cls(8, 512, 4)
        return launch._replace(columns=min(launch.columns, input_size & -input_size))


def one_token(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    launch: RowsLaunch | None = None,
) -> torch.Tensor:
    """hidden [1, input_size], normalised if `norm` is given, times weight transposed: [1, output_size].

    gated: weight is that of the gate above that of what it gates, and the result silu(gate) * up, half as wide.
    residual: [1, output_size], contiguous; the product is added to it, and it is what is returned. out: of that shape,
    too; the product replaces what it holds.
    The weight is read before earlier kernels have ended: it must not be what the one just before wrote.
    """
    input_size = hidden.shape[1]
    output_size = weight.shape[0] // 2 if gated else weight.shape[0]
    output = out if residual is None else residual
    if output is None:
        output = torch.empty(1, output_size, dtype=hidden.dtype, device=hidden.device)
    launch = launch or RowsLaunch.of(output_size, input_size)
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


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    attention_size = model.heads * model.head_dim

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    hidden, mixed = empty(1, model.hidden_size), empty(1, attention_size)
    gated = empty(1, model.intermediate_size)
    norm = Norm(empty(model.hidden_size), 1e-6)
    qkv = empty(attention_size + 2 * model.kv_heads * model.head_dim, model.hidden_size)
    output, down = empty(model.hidden_size, attention_size), empty(model.hidden_size, model.intermediate_size)
    gate_up, head = empty(2 * model.intermediate_size, model.hidden_size), empty(151936, model.hidden_size)
    every = [
        partial(one_token, hidden, qkv, norm),
        partial(one_token, mixed, output, residual=hidden),
        partial(one_token, hidden, gate_up, norm, gated=True),
        partial(one_token, gated, down, residual=hidden),
        partial(one_token, hidden, head),
    ]
    return [case for case in every if suits_one_token(*case.args[:2])]
