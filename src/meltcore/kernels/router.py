"""The router of a mixture of experts, for few tokens in one launch: the norm in front of it, its product, the choice.

A router is small, one of 256 experts for a hidden size of 2,048 is a megabyte: as kernels of their own, norm, product
and choice take the time of three launches. Here programs each take some rows of the router, and the one that ends last
for some tokens chooses their experts. The order of sums is fixed, whichever program was last.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from meltcore.kernels.capability import processors
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.linear import linear
from meltcore.kernels.norm import Norm, before_weight, rms_norm
from meltcore.kernels.overlap import overlaps, prefetch
from meltcore.kernels.routing import Routing, choose, route
from meltcore.kernels.sampling import _mixed
from meltcore.kernels.tiled_product import _arrivals

# Beyond, norm and product are bound by memory and matrix rate, and their kernels are better at both.
MAX_TOKENS = 1024
# Divides hidden_size, so that no load needs a mask on columns.
COLUMN_MULTIPLE = 64
# Experts of which a program can hold the logits of all its tokens.
_MAX_EXPERTS = 256
_FEWEST_TOKENS = 16  # of a tile


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
    normalised already, which is then returned as it is. drawn: a seed; experts are then drawn at random, all alike and
    anew in every call, and not by the product, which is computed all the same (for benchmarks on dummy weights). The
    router is read before earlier kernels have ended: it must not be what the one just before wrote.
    """
    if use_triton(residual) and suits_one_launch(residual, router):
        return _to_experts_triton(
            residual, norm, router, choices, renormalised=renormalised, shared=shared, drawn=drawn
        )
    return _to_experts_torch(residual, norm, router, choices, renormalised=renormalised, shared=shared, drawn=drawn)


def suits_one_launch(residual: torch.Tensor, router: torch.Tensor) -> bool:
    """Up to MAX_TOKENS tokens of a 16-bit type, in rows that can be read 16 bytes at a time."""
    return (
        1 <= residual.shape[0] <= MAX_TOKENS
        and residual.dtype == router.dtype
        and residual.dtype in (torch.bfloat16, torch.float16)
        and router.shape[0] <= _MAX_EXPERTS + 1
        and router.shape[1] % COLUMN_MULTIPLE == 0
        and residual.is_contiguous()
        and router.is_contiguous()
    )


def _to_experts_torch(
    residual: torch.Tensor,
    norm: Norm | None,
    router: torch.Tensor,
    choices: int,
    *,
    renormalised: bool,
    shared: bool,
    drawn: int | None,
) -> tuple[torch.Tensor, Routing]:
    hidden = rms_norm(residual, *norm) if norm else residual
    logits = linear(hidden, router)
    if drawn is not None:
        # In float32: 16 bits have so few numbers that equals, of which the lower expert is taken, would be common.
        logits = torch.rand(logits.shape, dtype=torch.float32, device=logits.device)
    return hidden, route(logits, choices, renormalised=renormalised, shared=shared)


@triton.jit
def _scales(rows_ptr, eps, INPUT: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """What brings each of TOKENS rows to unit mean square: [TOKENS, 1]."""
    squares = tl.zeros((TOKENS, COLUMNS), dtype=tl.float32)
    for start in tl.static_range(0, INPUT, COLUMNS):
        wide = tl.load(rows_ptr + start + tl.arange(0, COLUMNS)[None, :]).to(tl.float32)
        squares += wide * wide
    return tl.rsqrt(tl.sum(squares, axis=1) / INPUT + eps)[:, None]


@triton.jit
def _drawn_logits(draws_ptr, seed, TOKENS: tl.constexpr, EXPERT_BLOCK: tl.constexpr):
    """Of one tile of tokens: uniform in [0, 1), from a counter that goes on by one with every call."""
    tile = tl.program_id(2)
    draw = tl.atomic_add(draws_ptr + tile, 1)
    place = (tile * TOKENS + tl.arange(0, TOKENS)[:, None]) * EXPERT_BLOCK + tl.arange(0, EXPERT_BLOCK)[None, :]
    bits = _mixed(_mixed(_mixed(seed.to(tl.uint64)) + draw.to(tl.uint64)) ^ _mixed(place.to(tl.uint64)))
    return (bits >> 41).to(tl.int32).to(tl.float32) * (1.0 / (1 << 23))


@triton.jit(do_not_specialize=["tokens", "seed"])
def _router_kernel(
    residual_ptr,
    norm_ptr,
    router_ptr,
    hidden_ptr,
    experts_ptr,
    weights_ptr,
    partial_ptr,
    arrivals_ptr,
    draws_ptr,
    tokens,
    eps,
    seed,
    INPUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    SHARED: tl.constexpr,
    CHOICES: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    ROW_TILES: tl.constexpr,
    COLUMNS: tl.constexpr,
    SHARES: tl.constexpr,
    STAGES: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    CHOICE_BLOCK: tl.constexpr,
    RENORMALISED: tl.constexpr,
    NORMED: tl.constexpr,
    DRAWN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: one share of the columns, ROWS rows of the router, TOKENS tokens. The last of a tile of tokens
    chooses. EXPERTS are those to choose from, SHARED is 0 or 1 more. Tokens past the end repeat the last one."""
    WIDTH: tl.constexpr = INPUT // SHARES
    share, tile = tl.program_id(0), tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    first = tile * TOKENS
    token = first + tl.arange(0, TOKENS)
    rows_ptr = router_ptr + tl.minimum(row, EXPERTS + SHARED - 1)[:, None] * INPUT + share * WIDTH
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

    LINE: tl.constexpr = ROW_TILES * ROWS
    place = partial_ptr + (tile * SHARES * TOKENS + tl.arange(0, TOKENS))[:, None] * LINE
    tl.store(place + share * TOKENS * LINE + row[None, :], totals)
    tl.debug_barrier()  # all of this program's part is written before it is counted
    if tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel") != SHARES * ROW_TILES - 1:
        return
    tl.store(arrivals_ptr + tile, 0)
    # Other processors wrote them during this launch: past the L1 cache, which may hold older neighbours.
    expert = tl.arange(0, EXPERT_BLOCK)[None, :]
    logits = tl.load(place + expert, mask=expert < EXPERTS, other=0.0, cache_modifier=".cg")
    gates = tl.load(place + EXPERTS * SHARED, cache_modifier=".cg")
    for _ in tl.static_range(1, SHARES):
        place += TOKENS * LINE
        logits += tl.load(place + expert, mask=expert < EXPERTS, other=0.0, cache_modifier=".cg")
        gates += tl.load(place + EXPERTS * SHARED, cache_modifier=".cg")
    # As the product would stand in memory.
    logits = logits.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    gates = gates.to(hidden_ptr.dtype.element_ty).to(tl.float32)
    if DRAWN:
        logits = _drawn_logits(draws_ptr, seed, TOKENS, EXPERT_BLOCK)
    logits = tl.where(expert < EXPERTS, logits, float("-inf"))
    choose(logits, gates, experts_ptr, weights_ptr, token, tokens, EXPERTS, SHARED, CHOICES, CHOICE_BLOCK, RENORMALISED)


class RouterLaunch(NamedTuple):
    """How the product is cut up. tokens, rows: of a tile; columns: of a step of the loop; shares: of the sum."""

    tokens: int
    rows: int
    columns: int
    shares: int
    stages: int
    warps: int

    @classmethod
    def of(cls, tokens: int, rows: int, input_size: int, processors: int) -> RouterLaunch:
        """rows: of the router. As many shares, of up to four, as leave a processor for each program.

        More tokens go in larger tiles, since each program of a tile reads all its tokens.
        """
        if tokens > 128:
            return cls(32, 32, _columns(input_size, 128), 1, stages=3, warps=8)
        columns = _columns(input_size, 256)
        programs = -(-tokens // _FEWEST_TOKENS) * -(-rows // 16)
        steps = input_size // columns
        shares = max(
            count for count in (1, 2, 4) if steps % count == 0 and count * programs <= max(processors, programs)
        )
        return cls(_FEWEST_TOKENS, 16, columns, shares, stages=3, warps=4)


def _columns(input_size: int, most: int) -> int:
    """The largest power of two that divides `input_size`, up to `most`."""
    return min(most, input_size & -input_size)


def _to_experts_triton(
    residual: torch.Tensor,
    norm: Norm | None,
    router: torch.Tensor,
    choices: int,
    *,
    renormalised: bool,
    shared: bool,
    drawn: int | None,
    launch: RouterLaunch | None = None,
) -> tuple[torch.Tensor, Routing]:
    (tokens, size), device, count = residual.shape, residual.device, router.shape[0] - shared
    launch = launch or RouterLaunch.of(tokens, router.shape[0], size, processors(device))
    tiles, row_tiles = triton.cdiv(tokens, launch.tokens), triton.cdiv(router.shape[0], launch.rows)
    hidden = torch.empty_like(residual) if norm else residual
    norm_weight, eps = norm or (router, 0.0)
    experts = torch.empty(tokens, choices + shared, dtype=torch.int32, device=device)
    weights = torch.empty(experts.shape, dtype=torch.float32, device=device)
    places = tiles * launch.shares * launch.tokens * row_tiles * launch.rows
    overlap = overlaps(device)
    _router_kernel[(launch.shares, row_tiles, tiles)](
        residual,
        norm_weight,
        router,
        hidden,
        experts,
        weights,
        torch.empty(places, dtype=torch.float32, device=device),
        _arrivals(device),
        _draws(device) if drawn is not None else experts,
        tokens,
        eps,
        drawn or 0,
        INPUT=size,
        EXPERTS=count,
        SHARED=int(shared),
        CHOICES=choices,
        TOKENS=launch.tokens,
        ROWS=launch.rows,
        ROW_TILES=row_tiles,
        COLUMNS=launch.columns,
        SHARES=launch.shares,
        STAGES=launch.stages,
        EXPERT_BLOCK=triton.next_power_of_2(count),
        CHOICE_BLOCK=triton.next_power_of_2(choices + shared),
        RENORMALISED=renormalised,
        NORMED=norm is not None,
        DRAWN=drawn is not None,
        OVERLAP=overlap,
        num_warps=launch.warps,
        **({"launch_pdl": True} if overlap else {}),
    )
    return hidden, Routing(experts, weights)


@lru_cache
def _draws(device: torch.device) -> torch.Tensor:
    """How often experts were drawn for each tile of tokens. Captured graphs keep its address."""
    return torch.zeros(MAX_TOKENS // _FEWEST_TOKENS, dtype=torch.int32, device=device)


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes to torch
    router = torch.empty(model.experts + model.shared_expert, model.hidden_size, dtype=kind, device="meta")
    norm = Norm(torch.empty(model.hidden_size, dtype=torch.float32, device="meta"), 1e-6)

    def case(tokens: int, norm: Norm | None = norm, drawn: int | None = None) -> CompileCase:
        residual = torch.empty(tokens, model.hidden_size, dtype=kind, device="meta")
        return lambda: _to_experts_triton(
            residual, norm, router, model.choices, renormalised=True, shared=model.shared_expert, drawn=drawn
        )

    return [case(1), case(1024), case(1, None, drawn=1)]
