"""The router of a mixture of experts: the norm in front of it, its product, and the choice (routing.py).

A router is small, one of 256 experts for a hidden size of 2,048 is a megabyte: for few tokens norm and product take the
time of their launches, so there they are one. Its programs each take some rows of the router and a share of the
columns, and leave sums for the choice to add up.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.capability import shared_bytes
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.linear import linear
from meltcore.kernels.norm import Norm, before_weight, rms_norm
from meltcore.kernels.overlap import overlaps, prefetch
from meltcore.kernels.routing import Routing, route
from meltcore.kernels.tiled_product import MAX_TOKENS

# Tokens of which norm and product are one launch of this file's, and those normalised already, of which the product is.
# One alone, and more, are faster by products that are made for so many (H200, benchmarks/notes/experts.md).
ONE_LAUNCH, NORMALISED_ALREADY = range(2, 33), range(2, 129)
# Divides hidden_size, so that no load needs a mask on columns.
COLUMN_MULTIPLE = 64
# Of logits' rows in memory: matrix kernels store 16 bytes at a time where every row begins so.
_ROW_MULTIPLE = 8


def to_experts(
    residual: torch.Tensor,
    norm: Norm | None,
    router: torch.Tensor,
    choices: int,
    *,
    renormalised: bool,
    shared: bool = False,
    drawn: int | None = None,
) -> tuple[torch.Tensor, Routing]:
    """norm(residual), and the experts that its product with `router` sends each token to (see `route`).

    residual: [tokens, hidden_size], contiguous; router: [experts + shared, hidden_size]. norm: None where `residual` is
    normalised already, which is then returned as it is. drawn: a seed; experts are then drawn at random, and not by the
    product, which is computed all the same. The router is read before earlier kernels have ended: it must not be what
    the one just before wrote.
    """
    if use_triton(residual) and suits_one_launch(residual, norm, router):
        hidden, logits = _logits_triton(residual, norm, router)
    else:
        hidden = rms_norm(residual, *norm) if norm else residual
        logits = router_logits(hidden, router)
    routing = route(logits, choices, renormalised=renormalised, shared=shared, drawn=drawn, dtype=residual.dtype)
    return hidden, routing


def suits_one_launch(residual: torch.Tensor, norm: Norm | None, router: torch.Tensor) -> bool:
    """So many tokens of a 16-bit type, in rows that can be read 16 bytes at a time."""
    return (
        residual.shape[0] in (ONE_LAUNCH if norm else NORMALISED_ALREADY)
        and residual.dtype == router.dtype
        and residual.dtype in (torch.bfloat16, torch.float16)
        and router.shape[1] % COLUMN_MULTIPLE == 0
        and residual.is_contiguous()
        and router.is_contiguous()
    )


def router_logits(hidden: torch.Tensor, router: torch.Tensor) -> torch.Tensor:
    """hidden times the router transposed: [tokens, experts + shared]; rows may be strided.

    Where products are the library's, rows begin at multiples of 16 bytes and columns are a multiple of 8, with the rest
    apart: 257 in one product would be left to a kernel that stores one at a time, ten times as slow.
    """
    (tokens, _), rows = hidden.shape, router.shape[0]
    if tokens <= MAX_TOKENS:
        return linear(hidden, router)
    even = rows // _ROW_MULTIPLE * _ROW_MULTIPLE
    logits = hidden.new_empty(tokens, -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE)[:, :rows]
    torch.mm(hidden, router[:even].t(), out=logits[:, :even])
    if even < rows:
        torch.mm(hidden, router[even:].t(), out=logits[:, even:])
    return logits


@triton.jit
def _scales(rows_ptr, eps, INPUT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """What brings each of TOKENS rows to unit mean square: [TOKENS, 1]."""
    squares = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, INPUT, COLUMNS):
        wide = tl.load(rows_ptr + start + tl.arange(0, COLUMNS)[None, :]).to(tl.float32)
        squares += wide * wide
    return tl.rsqrt(tl.sum(squares, axis=1) / INPUT + eps)[:, None]


@triton.jit(do_not_specialize=["tokens"])
def _router_kernel(
    residual_ptr,
    norm_ptr,
    router_ptr,
    hidden_ptr,
    logits_ptr,
    tokens,
    eps,
    INPUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    NORMED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one share of the columns, ROWS of the router's EXPERTS rows, TOKENS tokens. Rows and tokens past
    the end repeat the last one and are not stored."""
    WIDTH: tl.constexpr = INPUT // SHARES
    share, tile = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tile * TOKENS + tl.arange(0, TOKENS)
    rows_ptr = router_ptr + tl.minimum(row, EXPERTS - 1)[:, None] * INPUT + share * WIDTH
    if OVERLAP:
        for start in tl.static_range(0, WIDTH, COLUMNS):
            prefetch(rows_ptr + (start + tl.arange(0, COLUMNS // 64) * 64)[None, :])
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tokens_ptr = residual_ptr + tl.minimum(token, tokens - 1)[:, None] * INPUT
    if NORMED:
        scales = _scales(tokens_ptr, eps, INPUT, TOKENS, COLUMNS)
    totals = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
    for start in tl.range(0, WIDTH, COLUMNS, num_stages=STAGES):
        step = share * WIDTH + start + tl.arange(0, COLUMNS)[None, :]
        weight = tl.load(rows_ptr + start + tl.arange(0, COLUMNS)[None, :])
        hidden = tl.load(tokens_ptr + step)
        if NORMED:
            normalised = before_weight(hidden.to(tl.float32) * scales, norm_ptr, hidden.dtype)
            hidden = (normalised * tl.load(norm_ptr + step).to(tl.float32)).to(hidden.dtype)
            # Every program needs it all; each writes some of it.
            own = start // COLUMNS % ROW_TILES == tl.program_id(1)
            tl.store(hidden_ptr + token[:, None] * INPUT + step, hidden, mask=(token < tokens)[:, None] & own)
        totals = tl.dot(hidden, tl.trans(weight), totals)
    place = logits_ptr + (share * tokens + token)[:, None] * EXPERTS + row[None, :]
    tl.store(place, totals, mask=(token < tokens)[:, None] & (row < EXPERTS)[None, :])


class RouterLaunch(NamedTuple):
    """How the product is cut up. tokens, rows: of a tile; columns: of a step of the loop; shares: of the sum."""

    tokens: int
    rows: int
    columns: int
    shares: int
    stages: int
    warps: int

    @classmethod
    def of(cls, tokens: int, input_size: int, shared_bytes: int, *, normed: bool) -> RouterLaunch:
        """What was best for Qwen3.5-35B-A3B's router. shared_bytes: that a program may have; normed: it normalises,
        which takes the longer the more tokens a tile has."""
        columns = min(256, input_size & -input_size)
        shares = max(each for each in (1, 2, 4) if input_size // columns % each == 0)
        launch = cls(16, 32, columns, shares, stages=3, warps=4)
        large = launch._replace(tokens=64)
        return large if tokens > 16 and not normed and large.bytes <= shared_bytes else launch

    @property
    def bytes(self) -> int:
        """Of shared memory, in 16 bits."""
        return self.stages * (self.tokens + self.rows) * self.columns * 2


def _logits_triton(
    residual: torch.Tensor, norm: Norm | None, router: torch.Tensor, launch: RouterLaunch | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(residual), and shares of its product with the router, [shares, tokens, rows of the router] float32."""
    (tokens, size), rows, device = residual.shape, router.shape[0], residual.device
    launch = launch or RouterLaunch.of(tokens, size, shared_bytes(device), normed=norm is not None)
    row_tiles = triton.cdiv(rows, launch.rows)
    hidden = torch.empty_like(residual) if norm else residual
    logits = torch.empty(launch.shares, tokens, rows, dtype=torch.float32, device=device)
    norm_weight, eps = norm or (router, 0.0)
    overlap = overlaps(device)
    _router_kernel[(launch.shares, row_tiles, triton.cdiv(tokens, launch.tokens))](
        residual,
        norm_weight,
        router,
        hidden,
        logits,
        tokens,
        eps,
        INPUT=size,
        EXPERTS=rows,
        TOKENS=launch.tokens,
        ROWS=launch.rows,
        ROW_TILES=row_tiles,
        COLUMNS=launch.columns,
        SHARES=launch.shares,
        STAGES=launch.stages,
        NORMED=norm is not None,
        OVERLAP=overlap,
        num_warps=launch.warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return hidden, logits


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    router = torch.empty(model.experts + model.shared_expert, model.hidden_size, dtype=kind, device="meta")
    norm = Norm(torch.empty(model.hidden_size, dtype=torch.float32, device="meta"), 1e-6)

    def case(tokens: int, norm: Norm | None = norm) -> CompileCase:
        residual = torch.empty(tokens, model.hidden_size, dtype=kind, device="meta")
        return lambda: _logits_triton(residual, norm, router)

    return [case(2), case(2, None), case(17, None)]
