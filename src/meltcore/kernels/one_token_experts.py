"""The experts of one token, in Triton: two launches that take as long as their weights take to be read.

The first is the way up, a few rows of one expert a program, in registers as in one_token.py. The second is the way
down: a program has the same few rows of every expert of the token and adds their outputs up, so nothing is stored in
between and no launch is needed to sum. It asks for its weights while the first launch still runs, for which it has to
know the experts: so the first one lets it start only once the router has ended (see overlap.py).
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.one_token import COLUMN_MULTIPLE, MAX_INPUT, read_columns, silu
from meltcore.kernels.overlap import overlaps
from meltcore.kernels.routing import Routing

# Elements of the weights that a thread holds at once: on the way down of more the compiler would spill some, on the way
# up a second round of programs would wait for the first (H200, benchmarks/notes/experts.md).
_HELD_UP, _COLUMNS_UP, _WARPS_UP = 64, 1024, 2
_MOST_HELD_DOWN, _COLUMNS_DOWN, _WARPS_DOWN, _LEAST_PROGRAMS = 288, 512, 2, 256


class DownLaunch(NamedTuple):
    """What a program of the way down covers of every expert. columns: read in one piece, over all warps."""

    rows: int
    columns: int
    warps: int

    @classmethod
    def of(cls, size: int, width: int, choices: int) -> DownLaunch | None:
        """None where a thread cannot hold the 8 elements, one access, of each piece of each expert."""
        columns = min(_COLUMNS_DOWN, width & -width)
        pieces = choices * (width // columns)
        warp_pieces = size * columns // 32  # elements of a column of pieces, shared out to a warp's threads
        fitting = [each for each in (32, 16, 8) if each * pieces <= _MOST_HELD_DOWN]
        if not fitting:
            return None
        elements = next((each for each in fitting if warp_pieces >= _LEAST_PROGRAMS * each), fitting[-1])
        warps = _WARPS_DOWN if warp_pieces >= _LEAST_PROGRAMS * elements * _WARPS_DOWN else 1
        return cls(max(1, elements * 32 * warps // columns), columns, warps)


def suits_one_token_experts(hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor) -> bool:
    """One token of a 16-bit type, in rows that can be read 16 bytes at a time and held by one program."""
    (tokens, size), width = hidden.shape, down.shape[2]
    return (
        tokens == 1
        and hidden.dtype == gate_up.dtype
        and hidden.dtype in (torch.bfloat16, torch.float16)
        and size <= MAX_INPUT
        and size % COLUMN_MULTIPLE == 0
        and width % COLUMN_MULTIPLE == 0
        and all(tensor.is_contiguous() for tensor in (hidden, gate_up, down))
        and DownLaunch.of(size, width, routing.experts.shape[1]) is not None
    )


@triton.jit
def _up_kernel(
    hidden_ptr,
    weight_ptr,
    output_ptr,
    experts_ptr,
    WIDTH: tl.constexpr,
    INPUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS columns of silu(gate x) * up x of one of the token's experts."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        # Not before: who starts on this may take the experts for known.
        tl.extra.cuda.gdc_launch_dependents()
    choice = tl.program_id(1)
    expert = tl.load(experts_ptr + choice).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    # Rows past the end repeat the last one: cheaper than a mask on every load.
    gates_ptr = weight_ptr + (expert * 2 * WIDTH + tl.minimum(row, WIDTH - 1))[:, None] * INPUT + column
    gates = read_columns(gates_ptr, INPUT, COLUMNS)
    ups = read_columns(gates_ptr + WIDTH * INPUT, INPUT, COLUMNS)
    hiddens = read_columns(hidden_ptr + column, INPUT, COLUMNS)
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in tl.static_range(INPUT // COLUMNS):
        hidden = hiddens[step].to(tl.float32)
        gate += gates[step].to(tl.float32) * hidden
        up += ups[step].to(tl.float32) * hidden
    result = silu(tl.sum(gate, axis=1)) * tl.sum(up, axis=1)
    tl.store(output_ptr + choice * WIDTH + row, result, mask=row < WIDTH)


@triton.jit
def _down_kernel(
    activated_ptr,
    weight_ptr,
    total_ptr,
    experts_ptr,
    shares_ptr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CHOICES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS columns of the weighted sum of all the token's experts. ADDED: to what stands there."""
    STEPS: tl.constexpr = WIDTH // COLUMNS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    within = tl.minimum(row, SIZE - 1)[:, None] * WIDTH + column
    weights = ()
    for choice in tl.static_range(CHOICES):
        # Past the L1 cache, which may hold what stood there for an earlier layer.
        expert = tl.load(experts_ptr + choice, cache_modifier=".cg").to(tl.int64)
        weights += read_columns(weight_ptr + expert * (SIZE * WIDTH) + within, WIDTH, COLUMNS)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if ADDED:
        before = tl.load(total_ptr + row, mask=row < SIZE, other=0.0)
    totals = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        share = tl.load(shares_ptr + choice)
        for step in tl.static_range(STEPS):
            activated = tl.load(activated_ptr + choice * WIDTH + step * COLUMNS + column).to(tl.float32)
            totals += weights[choice * STEPS + step].to(tl.float32) * (activated * share)
    result = tl.sum(totals, axis=1)
    if ADDED:
        result += before.to(tl.float32)
    tl.store(total_ptr + row, result, mask=row < SIZE)


def one_token_experts(
    total: torch.Tensor,
    hidden: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    *,
    added: bool,
) -> None:
    """Into `total` [1, hidden_size] the weighted sum of the token's experts; added: to what is there.

    What wrote `routing` must be the launch just before, or have ended. hidden: [1, hidden_size]; gate_up: [experts,
    2 * width, hidden_size]; down: [experts, hidden_size, width]. An expert's output is not rounded.
    """
    (_, size, width), choices = down.shape, routing.experts.shape[1]
    activated = torch.empty(choices, width, dtype=hidden.dtype, device=hidden.device)
    overlap = overlaps(hidden.device)
    early = {"launch_pdl": True} if overlap else {}
    rows = max(1, _HELD_UP * 32 * _WARPS_UP // (2 * triton.next_power_of_2(size)))
    _up_kernel[(triton.cdiv(width, rows), choices)](
        hidden,
        gate_up,
        activated,
        routing.experts,
        WIDTH=width,
        INPUT=size,
        ROWS=rows,
        COLUMNS=min(_COLUMNS_UP, size & -size),
        OVERLAP=overlap,
        num_warps=_WARPS_UP,
        **early,
    )
    launch = DownLaunch.of(size, width, choices)
    if launch is None:
        raise ValueError(f"{choices} experts of width {width} are more than a program can hold")
    _down_kernel[(triton.cdiv(size, launch.rows),)](
        activated,
        down,
        total,
        routing.experts,
        routing.weights,
        SIZE=size,
        WIDTH=width,
        CHOICES=choices,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        ADDED=added,
        OVERLAP=overlap,
        num_warps=launch.warps,
        **early,
    )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    kind = dtype if dtype.itemsize == 2 else torch.float16  # float32 goes through the general products
    experts, choices = model.experts + model.shared_expert, model.choices + model.shared_expert

    def empty(*shape: int, kind: torch.dtype = kind) -> torch.Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    hidden, gate_up = empty(1, model.hidden_size), empty(experts, 2 * model.expert_width, model.hidden_size)
    down = empty(experts, model.hidden_size, model.expert_width)
    routing = Routing(empty(1, choices, kind=torch.int32), empty(1, choices, kind=torch.float32))
    if not suits_one_token_experts(hidden, routing, gate_up, down):
        return []
    return [
        lambda: one_token_experts(hidden, hidden, routing, gate_up, down, added=True),
        lambda: one_token_experts(hidden, hidden, routing, gate_up, down, added=False),
    ]
