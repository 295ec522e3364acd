"""Products of up to 128 tokens with a weight matrix, in Triton: tiles small enough that all processors work.

At these sizes a product still takes about as long as its weights take to be read, and a library's tiles leave most
processors idle. Here the sum is split as well: a program takes some rows of the weight and a share of their columns,
and the last of a tile's programs to end adds up the shares, in their order. It asks for its weights before the kernel
in front has ended (see overlap.py). Sums are float32; results do not depend on which program was last.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.capability import processors, shared_bytes
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps, prefetch
from meltcore.kernels.product_tiles import gated_pairs, room_for_shares, source_of, sum_of_shares, tile_sums

# Up to which tiles are measured to gain on cuBLAS, whose programs share their reads of the tokens; and the same for a
# weight of so many numbers or more, of which 100 tokens' products of 2,048 columns took 28 to 52 us, cuBLAS 20 to 27.
MAX_TOKENS = 128
_LARGE, _MAX_TOKENS_OF_LARGE = 2**23, 64
# Divides input_size, so that no load needs a mask on columns.
COLUMN_MULTIPLE = 64
# Of a weight that is not left to the library: an output head has programs enough for the library's tiles.
MAX_ROWS = 2**14


def suits_tiles(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """A few tokens of a 16-bit type, in rows that can be read 16 bytes at a time."""
    most = _MAX_TOKENS_OF_LARGE if weight.numel() >= _LARGE else MAX_TOKENS
    return (
        1 <= hidden.shape[0] <= most
        and hidden.dtype == weight.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and weight.shape[0] <= MAX_ROWS
        and weight.shape[1] % COLUMN_MULTIPLE == 0
        and hidden.is_contiguous()
        and weight.is_contiguous()
    )


@triton.jit(do_not_specialize=["tokens"])
def _tiled_product_kernel(
    hidden_ptr,
    weight_ptr,
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
    """One program: one share of the columns, ROWS rows of the weight, TOKENS tokens.

    GATED: rows of the gate and of what it gates alternate. Rows and tokens past the end are the first ones again and
    are not stored: cheaper than a mask on every load. (When all repeated the last token, every program asked for its
    lines at once, over and over: 80 tokens took twice as long as 128.)
    """
    WIDTH: tl.constexpr = INPUT // SHARES
    share = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    source = source_of(row, OUTPUT, GATED)
    rows_ptr = weight_ptr + source.to(tl.int64)[:, None] * INPUT + share * WIDTH
    if OVERLAP:
        for start in tl.static_range(0, WIDTH, COLUMNS):
            prefetch(rows_ptr + (start + tl.arange(0, COLUMNS // 64) * 64)[None, :])
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = tl.arange(0, COLUMNS)[None, :]
    tokens_ptr = hidden_ptr + (token % tokens).to(tl.int64)[:, None] * INPUT + share * WIDTH
    column = tl.program_id(1) * (ROWS // 2 if GATED else ROWS) + tl.arange(0, ROWS // 2 if GATED else ROWS)
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
    if GATED:
        totals = gated_pairs(totals)
    if ADDED:
        totals += residual.to(tl.float32)
    tl.store(output, totals, mask=inside)


class TiledLaunch(NamedTuple):
    """How a product is cut up. tokens, rows: of a tile; columns: of a step of the loop; shares: of the sum."""

    tokens: int
    rows: int
    columns: int
    shares: int
    stages: int

    @classmethod
    def of(cls, tokens: int, rows: int, input_size: int, processors: int, shared_bytes: int) -> TiledLaunch:
        """rows: of the weight; shared_bytes: that a program may have.

        A program takes over half of a processor's shared memory. Where two fit, kernels that start early put two on
        one processor while others stay empty; so there are no more programs than processors, where that can be.
        Measured in a chain of 28 layers of Qwen3-0.6B (H200, benchmarks/notes/products.md).
        """
        tile = 16 if tokens <= 16 else 32 if tokens <= 32 else 64
        groups = -(-tokens // tile)
        # Tokens or rows: one of a tile's sides is the 64 or more that Hopper's tensor cores want.
        tile_rows = 32 if tile == 64 else 64
        while tile_rows < 128 and groups * -(-rows // tile_rows) > processors:
            tile_rows *= 2
        tiles = groups * -(-rows // tile_rows)
        columns = 128 if input_size % 128 == 0 else 64
        # Fewer columns are not worth the adding up, which costs the more the larger a tile is.
        least_width = 512 if 8 * tiles <= processors else 1024
        steps = input_size // columns
        most = max(1, min(processors // tiles, input_size // least_width))
        shares = max(count for count in range(1, most + 1) if steps % count == 0)
        step_bytes = 2 * (tile + tile_rows) * columns
        return cls(tile, tile_rows, columns, shares, shared_bytes // 2 // step_bytes + 1)


def tiled_product(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    launch: TiledLaunch | None = None,
) -> torch.Tensor:
    """hidden [tokens, input_size] times weight transposed: [tokens, output_size].

    gated: weight is that of the gate above that of what it gates, and the result silu(gate) * up, half as wide.
    residual: [tokens, output_size], contiguous; the product is added to it, and it is what is returned.
    The weight is read before earlier kernels have ended: it must not be what the one just before wrote.
    """
    tokens, input_size = hidden.shape
    output_size = weight.shape[0] // 2 if gated else weight.shape[0]
    output = residual
    if output is None:
        output = torch.empty(tokens, output_size, dtype=hidden.dtype, device=hidden.device)
    launch = launch or TiledLaunch.of(
        tokens, weight.shape[0], input_size, processors(hidden.device), shared_bytes(hidden.device)
    )
    grid = (launch.shares, triton.cdiv(weight.shape[0], launch.rows), triton.cdiv(tokens, launch.tokens))
    partial = arrivals = output  # unused where there is nothing to add up
    if launch.shares > 1:
        partial, arrivals = room_for_shares(grid, launch.rows * launch.tokens, hidden.device)
    overlap = overlaps(hidden.device)
    _tiled_product_kernel[grid](
        hidden,
        weight,
        output,
        partial,
        arrivals,
        tokens,
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
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return output


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    attention_size = model.heads * model.head_dim

    def case(
        tokens: int, output_size: int, input_size: int, *, gated: bool = False, added: bool = False
    ) -> CompileCase:
        hidden = torch.empty(tokens, input_size, dtype=kind, device="meta")
        weight = torch.empty(output_size, input_size, dtype=kind, device="meta")
        residual = torch.empty(tokens, output_size, dtype=kind, device="meta") if added else None
        return lambda: tiled_product(hidden, weight, gated=gated, residual=residual)

    return [
        make
        for tokens in (2, 17, 64, 128)
        for make in (
            case(tokens, attention_size + 2 * model.kv_heads * model.head_dim, model.hidden_size),
            case(tokens, model.hidden_size, attention_size, added=True),
            case(tokens, 2 * model.intermediate_size, model.hidden_size, gated=True),
            case(tokens, model.hidden_size, model.intermediate_size, added=True),
        )
    ]
