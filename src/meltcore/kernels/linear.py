"""Products of a few tokens with a weight matrix, which take as long as the weights take to be read.

For a handful of tokens a general matrix product spends most of its time waiting: it has too few programs, splits the
sum over launches, or asks for too little at once. Here a program owns a few rows of the weight and asks for as much of
them as it can hold before it computes. Sums are float32, in a fixed order, and rounded once.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton

# One side of a tensor core's product: more tokens would need a second pass, and cuBLAS does well there.
MAX_TOKENS = 16
# Outputs up to which a product of 2 to MAX_TOKENS tokens leaves cuBLAS with too few programs.
FEW_OUTPUTS = 2048
# Divides input_size, so that no load needs a mask on columns and every row starts on a cache line.
COLUMN_MULTIPLE = 64


def linear(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """hidden [tokens, input_size] times weight [output_size, input_size] transposed: [tokens, output_size].

    The Triton body serves what it is made for (see `_suits`); every other product is torch's, on CUDA too.
    """
    body = _linear_triton if use_triton(hidden) and _suits(hidden, weight) else _linear_torch
    return body(hidden, weight)


def _suits(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """One token, or up to MAX_TOKENS and few outputs; of a 16-bit type, in rows that can be read 16 bytes at a time.

    With more outputs cuBLAS is as fast from two tokens on (H200, 2026-11-21, benchmarks/results/linear.json).
    """
    tokens = hidden.shape[0]
    return (
        (tokens == 1 or (1 < tokens <= MAX_TOKENS and weight.shape[0] <= FEW_OUTPUTS))
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] % COLUMN_MULTIPLE == 0
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )


def _linear_torch(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.linear(hidden, weight)


@triton.jit(do_not_specialize=["output_size"])
def _one_token_kernel(
    hidden_ptr,
    weight_ptr,
    output_ptr,
    output_size,
    INPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One program: ROWS outputs of the one token. The loop is unrolled so that its loads can all be issued first."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    # Rows past the end repeat the last one: cheaper than a mask on every load.
    weight_rows = weight_ptr + tl.minimum(row, output_size - 1).to(tl.int64)[:, None] * INPUT
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, INPUT, COLUMNS):
        weight = tl.load(weight_rows + start + column, eviction_policy="evict_first")
        hidden = tl.load(hidden_ptr + start + column)
        total += weight.to(tl.float32) * hidden.to(tl.float32)
    tl.store(output_ptr + row, tl.sum(total, axis=1), mask=row < output_size)


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
    STAGES: tl.constexpr,
):
    """One program: ROWS outputs of every token. Each warp sums its own share of the columns, by batched products.

    Tokens are the side of the product that the hardware pads to 16, so that ROWS can be as few as 8.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = (tl.arange(0, SHARES)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :])[:, None, :]
    weight_rows = weight_ptr + tl.minimum(row, output_size - 1).to(tl.int64)[None, :, None] * INPUT + column
    hidden_rows = hidden_ptr + token[None, :, None] * INPUT + column
    existing = (token < tokens)[None, :, None]
    totals = tl.zeros((SHARES, TOKENS, ROWS), dtype=tl.float32)
    for start in tl.range(0, INPUT, SHARES * COLUMNS, num_stages=STAGES):
        weight = tl.load(weight_rows + start, eviction_policy="evict_first")
        hidden = tl.load(hidden_rows + start, mask=existing, other=0.0)
        totals = tl.dot(hidden, tl.permute(weight, (0, 2, 1)), totals)
    output = output_ptr + token[:, None].to(tl.int64) * output_size + row[None, :]
    tl.store(output, tl.sum(totals, axis=0), mask=(token < tokens)[:, None] & (row < output_size)[None, :])


class LinearLaunch(NamedTuple):
    """What one program covers. columns: of a loop step, over all warps; a power of two that divides input_size."""

    rows: int
    columns: int
    warps: int = 4
    stages: int = 1

    @classmethod
    def of(cls, tokens: int, output_size: int, input_size: int) -> LinearLaunch:
        """For a program a multiprocessor or more, and about 16 KiB of weights that each has under way."""
        if tokens == 1:
            # A thread holds 4 to 8 loads of 16 bytes a step.
            rows, columns, stages = (4 if output_size <= FEW_OUTPUTS else 8), 1024, 1
        else:
            rows, columns, stages = 8, 256, 4
        divisor = input_size & -input_size
        return cls(rows, min(columns, divisor), 4, stages)


def _linear_triton(hidden: torch.Tensor, weight: torch.Tensor, launch: LinearLaunch | None = None) -> torch.Tensor:
    tokens, (output_size, input_size) = hidden.shape[0], weight.shape
    launch = launch or LinearLaunch.of(tokens, output_size, input_size)
    output = torch.empty(tokens, output_size, dtype=hidden.dtype, device=hidden.device)
    grid = (triton.cdiv(output_size, launch.rows),)
    if tokens == 1:
        _one_token_kernel[grid](
            hidden,
            weight,
            output,
            output_size,
            INPUT=input_size,
            ROWS=launch.rows,
            COLUMNS=launch.columns,
            num_warps=launch.warps,
        )
    else:
        _few_tokens_kernel[grid](
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
            STAGES=launch.stages,
            num_warps=launch.warps,
        )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    attention_size = model.heads * model.head_dim
    shapes = [
        (attention_size + 2 * model.kv_heads * model.head_dim, model.hidden_size),
        (model.hidden_size, attention_size),
        (2 * model.intermediate_size, model.hidden_size),
        (model.hidden_size, model.intermediate_size),
        (151936, model.hidden_size),  # an output head
    ]

    def case(tokens: int, output_size: int, input_size: int) -> CompileCase:
        hidden = torch.empty(tokens, input_size, dtype=kind, device="meta")
        weight = torch.empty(output_size, input_size, dtype=kind, device="meta")
        return lambda: _linear_triton(hidden, weight)

    few = [shape for shape in shapes if shape[0] <= FEW_OUTPUTS]
    return [case(1, *shape) for shape in shapes] + [case(MAX_TOKENS, *shape) for shape in few]
