"""GEMV in Triton: it multiplies one token by a weight in the time that reading the weight takes.

For one token a general GEMM mostly waits: it has too few programs, splits the sum over launches, or has too few loads
in flight. Here a program takes a few rows of the weight and holds all of them in registers. It loads them before the
previous kernel has ended (see launch.py). It fuses the norm before the GEMV, and the activation or the residual add
after it. Sums are float32, in a fixed order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import tl, triton
from meltcore.kernels.launch import pdl_options, pdl_sync
from meltcore.kernels.norm import Norm

# Divides K, so that no load needs a mask on columns and every row starts on a cache line.
K_MULTIPLE = 64
# A program holds all columns of its rows in registers. 8 rows of gate and 8 of up would take 256 per thread for 4,096
# columns: 77 us for 28,672 of them, where cuBLAS takes 62 without norm and SwiGLU (H200).
MAX_K, MAX_GATED_K = 4096, 2048


def supports(hidden: torch.Tensor, weight: torch.Tensor, *, gated: bool = False) -> bool:
    """Return whether the kernel supports this weight and token.

    It needs one token of a 16-bit type, rows that fit into registers, and 16-byte reads.
    """
    return (
        hidden.shape[0] == 1
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[1] <= (MAX_GATED_K if gated else MAX_K)
        and weight.shape[1] % K_MULTIPLE == 0
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )


@triton.jit
def load_columns(start_ptr, K: tl.constexpr, STEP: tl.constexpr):
    """Load the values at every STEP columns from `start_ptr` on, as a tuple, so that all loads are in flight."""
    blocks = ()
    for start in tl.static_range(0, K, STEP):
        blocks += (tl.load(start_ptr + start),)  # type: ignore[assignment]
    return blocks


@triton.jit
def silu(gate):
    """Return gate * sigmoid(gate)."""
    return gate / (1.0 + tl.exp(-gate))


@triton.jit(do_not_specialize=["output_size"])
def _gemv_kernel(
    hidden_ptr,
    norm_ptr,
    weight_ptr,
    output_ptr,
    output_size,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Each program computes BLOCK_N outputs. It applies the norm's factor to the sums, beside which it is computed."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = tl.arange(0, BLOCK_K)[None, :]
    # Rows past the end repeat the last one: cheaper than a mask on every load.
    rows_ptr = weight_ptr + tl.minimum(row, output_size - 1).to(tl.int64)[:, None] * K + column
    weight_blocks = load_columns(rows_ptr, K, BLOCK_K)
    if GATED:
        up_weight_blocks = load_columns(rows_ptr + output_size.to(tl.int64) * K, K, BLOCK_K)
    if HAS_NORM:
        norm_blocks = load_columns(norm_ptr + column, K, BLOCK_K)
    pdl_sync(PDL)
    hidden_blocks = load_columns(hidden_ptr + column, K, BLOCK_K)
    if HAS_RESIDUAL:
        residual = tl.load(output_ptr + row, mask=row < output_size, other=0.0)
    acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up_acc = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((1, BLOCK_K), dtype=tl.float32)
    for step in tl.static_range(K // BLOCK_K):
        hidden = hidden_blocks[step].to(tl.float32)
        if HAS_NORM:
            squares += hidden * hidden
            hidden *= norm_blocks[step].to(tl.float32)
        acc += weight_blocks[step].to(tl.float32) * hidden
        if GATED:
            up_acc += up_weight_blocks[step].to(tl.float32) * hidden
    result = tl.sum(acc, axis=1)
    if HAS_NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
        result *= factor
        if GATED:
            result = silu(result) * (tl.sum(up_acc, axis=1) * factor)
    elif GATED:
        result = silu(result) * tl.sum(up_acc, axis=1)
    if HAS_RESIDUAL:
        result += residual.to(tl.float32)
    tl.store(output_ptr + row, result, mask=row < output_size)


def output_tensor(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    gated: bool,
    residual: torch.Tensor | None,
    out: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return what a GEMM writes, [tokens, N]: `residual` or `out` if it is given, else new memory.

    N is the number of the weight's rows, or half of it if `gated`. `dtype` is the type of new memory. None takes the
    type of `hidden`.
    """
    output = out if residual is None else residual
    n = len(weight) // 2 if gated else len(weight)
    return hidden.new_empty(len(hidden), n, dtype=dtype) if output is None else output


class GemvConfig(NamedTuple):
    """The configuration of a GEMV: rows per program, columns per load (a power of two that divides K), and warps."""

    block_n: int
    block_k: int
    num_warps: int

    @classmethod
    def select(cls, output_size: int, k: int) -> GemvConfig:
        """Return the configuration with enough programs for every SM and few enough that all run concurrently.

        The sizes were measured on an H200 in a chain of 28 layers of Qwen3-0.6B, and for more than 1,024 columns with
        Qwen3.5-35B-A3B. Longer rows are read in blocks of 512, because sums over 1,024 columns would not fit into
        registers beside the weights (docs/decisions/small-batch-gemm.md and mixture-of-experts.md).
        """
        config = cls(4, 1024, 4)
        if output_size > 2048:
            config = cls(8, 1024, 2) if k <= 1024 else cls(8, 512, 4)
        return config._replace(block_k=min(config.block_k, k & -k))


def gemv(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    norm: Norm | None = None,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: GemvConfig | None = None,
) -> torch.Tensor:
    """Compute norm(hidden) W^T: hidden [1, K], weight [N, K] -> [1, N].

    The weight is read before the previous kernel has ended, so that kernel must not write it.

    Args:
        hidden: [1, K].
        weight: [N, K].
        norm: None means that `hidden` is normalized already.
        gated: whether the weight holds gate rows above up rows, and the result is silu(gate) * up, [1, N / 2].
        residual: [1, N], contiguous. The result is added to `residual` in place, and `residual` is returned.
        out: [1, N], of the type of `hidden` or float32. The result is written to `out`.
        config: None selects a configuration by size.
    """
    k = hidden.shape[1]
    output = output_tensor(hidden, weight, gated, residual, out)
    output_size = output.shape[1]
    config = config or GemvConfig.select(output_size, k)
    norm_weight, eps = norm or (weight, 0.0)
    _gemv_kernel[(triton.cdiv(output_size, config.block_n),)](
        hidden,
        norm_weight,
        weight,
        output,
        output_size,
        eps,
        K=k,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        HAS_NORM=norm is not None,
        GATED=gated,
        HAS_RESIDUAL=residual is not None,
        num_warps=config.num_warps,
        **pdl_options(hidden.device),
    )
    return output
