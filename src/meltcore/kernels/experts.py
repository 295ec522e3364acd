"""The feed-forward of routed experts: each token through the few that its router chose.

In Triton it is three launches: a product with the gate and what it gates, one with the way down, and the sum over a
token's experts. A product runs over pairs in order of their expert (kernels/routing.py). A program takes one tile: rows
of an expert's weight, and some of its pairs. How many tiles there are is known on the device alone, so the most there
can be are launched, and those too many end at once: nothing waits for the host, and a graph can hold it. No sum depends
on the order in which programs run, nor one pair's on which others there are.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

from meltcore.kernels.capability import capability, shared_bytes
from meltcore.kernels.dispatch import use_triton
from meltcore.kernels.expert_launches import TABLE
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps
from meltcore.kernels.routing import Routing, Segments, by_expert
from meltcore.kernels.swiglu import swiglu

# Columns of a program that sums up: 8 elements a thread of 4 warps, 16 bytes in 16-bit types.
_SUM_BLOCK = 1024
_MOST_STAGES = 4
# Bytes of an expert's way down up to which it is small (see `are_alone`).
_SMALL_EXPERT = 2**19
_TUNED = 90  # the compute capability that the table of launches is for


def experts_add(
    residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Add, for each token, the weighted sum of its experts' outputs to `residual` in place, and return it.

    Without a residual the sum alone is returned. An expert's output is down (silu(gate x) * up x), rounded to the type
    of `hidden`; the sum over a token's experts is float32. residual, hidden: [tokens, hidden_size], contiguous;
    gate_up: [experts, 2 * width, hidden_size], the gate's rows above those of what it gates; down: [experts,
    hidden_size, width].
    """
    body = _experts_add_triton if use_triton(hidden) else _experts_add_torch
    return body(residual, hidden, routing, gate_up, down)


def _experts_add_torch(
    residual: torch.Tensor | None, hidden: torch.Tensor, routing: Routing, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Expert by expert, those that have tokens. The host reads where segments end, so no graph can hold this body."""
    tokens, choices = routing.experts.shape
    pairs, bounds = by_expert(routing.experts, gate_up.shape[0])
    outputs = torch.empty(tokens * choices, hidden.shape[1], dtype=hidden.dtype, device=hidden.device)
    for expert, (start, end) in enumerate(pairwise(bounds.tolist())):
        if start < end:
            own = pairs[start:end]
            activated = swiglu(hidden[own // choices] @ gate_up[expert].t())
            outputs[own] = activated @ down[expert].t()
    weighted = outputs.view(tokens, choices, -1).float() * routing.weights[:, :, None]
    total = weighted.sum(1)
    return total.to(hidden.dtype) if residual is None else residual.add_(total)


@triton.jit
def _tile_of(bounds_ptr, tile, PAIRS: tl.constexpr, EXPERTS: tl.constexpr, EXPERT_BLOCK: tl.constexpr):
    """The tile's expert, the place of its first pair and the place that its expert's pairs end at. A tile past the last
    one has no pairs: it starts where it ends."""
    expert = tl.arange(0, EXPERT_BLOCK)
    starts = tl.load(bounds_ptr + expert, mask=expert < EXPERTS, other=0)
    ends = tl.load(bounds_ptr + expert + 1, mask=expert < EXPERTS, other=0)
    tiles = (ends - starts + PAIRS - 1) // PAIRS
    upto = tl.cumsum(tiles, axis=0)
    own = (upto > tile) & (upto - tiles <= tile)
    first = starts + (tile - upto + tiles) * PAIRS
    return (
        tl.sum(tl.where(own, expert, 0), axis=0),
        tl.sum(tl.where(own, first, 0), axis=0),
        tl.sum(tl.where(own, ends, 0), axis=0),
    )


@triton.jit
def _columns(rows_ptr, start, INPUT: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of some rows from `start` on; zeros past the end."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    if INPUT % COLUMNS == 0:
        return tl.load(rows_ptr + column)
    return tl.load(rows_ptr + column, mask=column < INPUT, other=0.0)


@triton.jit
def _expert_product_kernel(
    input_ptr,
    weight_ptr,
    output_ptr,
    pairs_ptr,
    bounds_ptr,
    OUTPUT: tl.constexpr,
    INPUT: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    EXPERT_BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    ALONE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS rows of an expert's weight, up to PAIRS of its pairs.

    ALONE: a tile for each pair, which keep their order; `pairs_ptr` are their experts.
    GATED: from tokens to places in the order of experts, rows of the gate and of what it gates alternating. Else from
    such places to pairs. Rows and pairs past the end repeat the last one and are not stored.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if ALONE:
        first = tl.program_id(1)
        end = first + 1
        expert = tl.load(pairs_ptr + first)
    else:
        expert, first, end = _tile_of(bounds_ptr, tl.program_id(1), PAIRS, EXPERTS, EXPERT_BLOCK)
        if first >= end:
            return
    place = first + tl.arange(0, PAIRS)
    source = tl.minimum(place, end - 1)
    pair = source if ALONE else tl.load(pairs_ptr + source)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if GATED:
        inputs_ptr = input_ptr + (pair // CHOICES).to(tl.int64)[:, None] * INPUT
        rows = tl.minimum(row // 2, OUTPUT - 1) + row % 2 * OUTPUT
        output = output_ptr + place.to(tl.int64)[:, None] * OUTPUT
    else:
        inputs_ptr = input_ptr + source.to(tl.int64)[:, None] * INPUT
        rows = tl.minimum(row, OUTPUT - 1)
        output = output_ptr + pair.to(tl.int64)[:, None] * OUTPUT
    rows_ptr = weight_ptr + (expert.to(tl.int64) * (2 * OUTPUT if GATED else OUTPUT) + rows)[:, None] * INPUT
    # The tensor cores want the longer side first: 64 rows at least on Hopper.
    if ROWS > PAIRS:
        totals = tl.zeros((ROWS, PAIRS), dtype=tl.float32)
    else:
        totals = tl.zeros((PAIRS, ROWS), dtype=tl.float32)
    for start in tl.range(0, INPUT, COLUMNS, num_stages=STAGES):
        weight = _columns(rows_ptr, start, INPUT, COLUMNS)
        inputs = _columns(inputs_ptr, start, INPUT, COLUMNS)
        if ROWS > PAIRS:
            totals = tl.dot(weight, tl.trans(inputs), totals, input_precision="ieee")
        else:
            totals = tl.dot(inputs, tl.trans(weight), totals, input_precision="ieee")
    if ROWS > PAIRS:
        totals = tl.trans(totals)
    if GATED:
        gate, up = tl.split(tl.reshape(totals, (PAIRS, ROWS // 2, 2)))
        totals = gate / (1.0 + tl.exp(-gate)) * up
    column = tl.program_id(0) * (ROWS // 2 if GATED else ROWS) + tl.arange(0, ROWS // 2 if GATED else ROWS)[None, :]
    tl.store(output + column, totals, mask=(place < end)[:, None] & (column < OUTPUT))


@triton.jit
def _add_choices_kernel(
    total_ptr,
    outputs_ptr,
    weights_ptr,
    SIZE: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: BLOCK columns of one token, one choice after the other. ADDED: to what stands there."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for choice in tl.static_range(CHOICES):
        pair = token * CHOICES + choice
        output = tl.load(outputs_ptr + pair * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * output
    if ADDED:
        total += tl.load(total_ptr + token * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(total_ptr + token * SIZE + column, total, mask=inside)


class ExpertsLaunch(NamedTuple):
    """How a product is cut up. pairs, rows: of a tile; columns: of a step of the loop."""

    pairs: int
    rows: int
    columns: int
    stages: int
    warps: int

    @classmethod
    def of(cls, pairs: int, weight: torch.Tensor) -> ExpertsLaunch:
        """pairs: of all experts together; weight: [experts, rows, columns]. What was found for it on such a device, or
        what is sound everywhere.
        """
        found = TABLE.get(tuple(weight.shape)) if capability(weight.device) == _TUNED else None
        if found and weight.element_size() == 2:
            return cls(*next((launch for most, launch in found if pairs <= most), found[-1][1]))
        return cls.sound(pairs, weight.shape[0], weight.element_size(), shared_bytes(weight.device))

    @classmethod
    def sound(cls, pairs: int, experts: int, element_bytes: int, shared_bytes: int) -> ExpertsLaunch:
        """pairs: of all experts together; shared_bytes: that a program may have.

        A tile holds twice what an expert gets where all get the same, up to 128: a second tile would read the weight
        again, and up to there reading it is what takes the time. Few sizes, since each is compiled. Float32, which has
        no tensor cores here, keeps to the smallest.
        """
        even = pairs / experts
        tile = 16 if even <= 8 or element_bytes > 2 else 64 if even <= 32 else 128
        rows = 64 if tile == 16 else 128
        columns = (256 if tile == 16 else 128) // element_bytes
        step_bytes = (tile + rows) * columns * element_bytes
        stages = max(2, min(_MOST_STAGES, shared_bytes // step_bytes))
        return cls(tile, rows, columns, stages, 8 if tile == 128 else 4)


def are_alone(tokens: int, down: torch.Tensor) -> bool:
    """Whether each pair gets a tile of its own, without being put in order first, which takes about 3 us.

    So few tokens hardly share an expert but the one that all have; small experts come from the L2 cache the second time
    (H200, Qwen3.5's: at width 512 as fast as in order for 3 tokens, at width 64 for 8; 2026-11-21).
    """
    return tokens <= (8 if down[0].nbytes <= _SMALL_EXPERT else 2)


def _experts_add_triton(
    residual: torch.Tensor | None,
    hidden: torch.Tensor,
    routing: Routing,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    launch: ExpertsLaunch | None = None,
) -> torch.Tensor:
    (tokens, size), width, choices = hidden.shape, down.shape[2], routing.experts.shape[1]
    total = torch.empty_like(hidden) if residual is None else residual
    if tokens == 0:
        return total
    alone = are_alone(tokens, down)
    segments = Segments(routing.experts, routing.experts) if alone else by_expert(routing.experts, down.shape[0])
    activated = torch.empty(tokens * choices, width, dtype=hidden.dtype, device=hidden.device)
    outputs = torch.empty(tokens * choices, size, dtype=hidden.dtype, device=hidden.device)
    _product(hidden, gate_up, activated, segments, choices, launch, gated=True, alone=alone)
    _product(activated, down, outputs, segments, choices, launch, gated=False, alone=alone)
    overlap = overlaps(hidden.device)
    _add_choices_kernel[(tokens, triton.cdiv(size, _SUM_BLOCK))](
        total,
        outputs,
        routing.weights,
        SIZE=size,
        CHOICES=choices,
        BLOCK=_SUM_BLOCK,
        ADDED=residual is not None,
        OVERLAP=overlap,
        num_warps=4,
        **({"launch_pdl": True} if overlap else {}),
    )
    return total


def _product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    segments: Segments,
    choices: int,
    launch: ExpertsLaunch | None,
    *,
    gated: bool,
    alone: bool,
) -> None:
    experts, rows, input_size = weight.shape
    pairs = segments.pairs.numel()
    launch = launch or ExpertsLaunch.of(pairs, weight)
    # An expert with pairs ends with at most one tile that is not full.
    most_tiles = pairs if alone else min(pairs, pairs // launch.pairs + min(pairs, experts))
    overlap = overlaps(weight.device)
    _expert_product_kernel[(triton.cdiv(rows, launch.rows), most_tiles)](
        inputs,
        weight,
        output,
        *segments,
        OUTPUT=output.shape[1],
        INPUT=input_size,
        EXPERTS=experts,
        CHOICES=choices,
        EXPERT_BLOCK=triton.next_power_of_2(experts),
        PAIRS=launch.pairs,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        STAGES=launch.stages,
        GATED=gated,
        ALONE=alone,
        OVERLAP=overlap,
        num_warps=launch.warps,
        **({"launch_pdl": True} if overlap else {}),
    )


def compile_cases(model: ModelShape, dtype: torch.dtype) -> list[CompileCase]:
    if model.experts == 0:
        return []
    experts, choices = model.experts + model.shared_expert, model.choices + model.shared_expert
    gate_up = torch.empty(experts, 2 * model.expert_width, model.hidden_size, dtype=dtype, device="meta")
    down = torch.empty(experts, model.hidden_size, model.expert_width, dtype=dtype, device="meta")

    def case(tokens: int) -> CompileCase:
        hidden = torch.empty(tokens, model.hidden_size, dtype=dtype, device="meta")
        chosen = torch.empty(tokens, choices, dtype=torch.int32, device="meta")
        routing = Routing(chosen, torch.empty(chosen.shape, device="meta"))
        return lambda: _experts_add_triton(None if tokens == 1 else hidden, hidden, routing, gate_up, down)

    pairs = [choices] + [each * experts for each in ((1, 32, 64) if dtype.itemsize == 2 else (1,))]
    if capability(gate_up.device) == _TUNED:
        pairs += [most for weight in (gate_up, down) for most, _ in TABLE.get(tuple(weight.shape), ())]
    return [case(each // choices) for each in pairs]
