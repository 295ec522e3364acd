"""Products of pairs of a token and an expert with the experts' weights, in Triton.

A program takes rows of an expert's weight, and a tile of its pairs. How it finds them depends on
how many tokens there are. Of very few each pair is a tile ("alone"). Of more, there is a program for each pair as well;
it looks through all of them for its expert's, and has something to do where its own is the first of a tile ("found").
Many are placed in tiles first (expert_places.py), which is one launch more, or three ("placed"). Which experts have
pairs is known on the device alone, so the most programs there can be are launched, and those too many end at once:
nothing waits for the host, and a graph can hold it. No sum depends on the order in which programs run, nor one pair's
on which others there are.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from functools import cache
from typing import Literal, NamedTuple

import torch

from meltcore.kernels.capability import capability, shared_bytes
from meltcore.kernels.expert_launches import TABLE
from meltcore.kernels.expert_places import Places, place_pairs
from meltcore.kernels.jit import CompileCase, ModelShape, tl, triton
from meltcore.kernels.overlap import overlaps
from meltcore.kernels.routing import pairs_of

Form = Literal["alone", "found", "placed"]
# Up to how many tokens pairs are alone, the second where an expert's way down has up to so many bytes; and found.
_ALONE_TOKENS, _ALONE_TOKENS_SMALL, _SMALL_EXPERT = 2, 8, 2**19
FOUND_TOKENS = 16
_MOST_STAGES = 4
_MOST_UNLIKE = 2.0  # times as many rows or columns, for launches to be taken over
_TUNED = 90  # the compute capability that the table of launches is for


@triton.jit
def _columns(rows_ptr, start, INPUT: tl.constexpr, COLUMNS: tl.constexpr):
    """COLUMNS columns of some rows from `start` on; zeros past the end."""
    column = start + tl.arange(0, COLUMNS)[None, :]
    if INPUT % COLUMNS == 0:
        return tl.load(rows_ptr + column)
    return tl.load(rows_ptr + column, mask=column < INPUT, other=0.0)


@triton.jit
def _found(experts_ptr, tokens, CHOICES: tl.constexpr, PAIRS: tl.constexpr, MOST_TOKENS: tl.constexpr):
    """The expert of this program's pair, its tile of that expert's pairs (past the end the last one repeats), and which
    of them are its own to store: none but where its pair is the first of a tile."""
    number = tl.program_id(1)
    expert = tl.load(experts_ptr + number)
    has, pairs = pairs_of(expert, experts_ptr, tokens, MOST_TOKENS, CHOICES)
    before = tl.sum(tl.where(tl.arange(0, MOST_TOKENS) < number // CHOICES, has, 0), axis=0)
    end = tl.sum(has, axis=0)
    if before % PAIRS != 0:
        end = before
    place = before + tl.arange(0, PAIRS)
    own = (tl.cumsum(has, axis=0) - 1)[None, :] == tl.minimum(place, end - 1)[:, None]
    pair = tl.sum(tl.where(own & (has > 0)[None, :], pairs[None, :], 0), axis=1)
    return expert, pair, place < end, before < end


@triton.jit(do_not_specialize=["tokens"])
def _expert_product_kernel(
    input_ptr,
    weight_ptr,
    output_ptr,
    experts_ptr,
    pairs_ptr,
    owners_ptr,
    filled_ptr,
    tokens,
    OUTPUT: tl.constexpr,
    INPUT: tl.constexpr,
    CHOICES: tl.constexpr,
    MOST_TOKENS: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    FORM: tl.constexpr,
    GATED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: ROWS rows of an expert's weight, up to PAIRS of its pairs; past the end one of them repeats.

    GATED: from tokens to pairs, rows of the gate and of what it gates alternating. Else from pairs to pairs. Rows past
    the end repeat the last one and are not stored.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.arange(0, PAIRS)
    if FORM == "alone":
        pair = tl.program_id(1) + slot * 0
        expert = tl.load(experts_ptr + tl.program_id(1))
        inside = slot == 0
    elif FORM == "found":
        expert, pair, inside, any_inside = _found(experts_ptr, tokens, CHOICES, PAIRS, MOST_TOKENS)
        if not any_inside:
            return
    else:
        tile = tl.program_id(1)
        filled = tl.load(filled_ptr + tile)
        expert = tl.load(owners_ptr + tile)
        first = tl.load(pairs_ptr + tile * PAIRS)
        pair = tl.load(pairs_ptr + tile * PAIRS + slot)  # all asked for at once
        if filled == 0:
            return
        inside = slot < filled
        pair = tl.where(inside, pair, first)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if GATED:
        rows = tl.minimum(row // 2, OUTPUT - 1) + row % 2 * OUTPUT
        source = pair // CHOICES
    else:
        rows = tl.minimum(row, OUTPUT - 1)
        source = pair
    inputs_ptr = input_ptr + source.to(tl.int64)[:, None] * INPUT
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
    output = output_ptr + pair.to(tl.int64)[:, None] * OUTPUT + column
    tl.store(output, totals, mask=inside[:, None] & (column < OUTPUT))


class ExpertsLaunch(NamedTuple):
    """How a product is cut up. pairs, rows: of a tile; columns: of a step of the loop."""

    pairs: int
    rows: int
    columns: int
    stages: int
    warps: int

    @classmethod
    def of(cls, pairs: int, weight: torch.Tensor) -> ExpertsLaunch:
        """pairs: of all experts together; weight: [experts, rows, columns]. What was found on such a device for it, or
        for the most similar one at as many pairs an expert; else what is sound everywhere.
        """
        found = _found_for(tuple(weight.shape)) if capability(weight.device) == _TUNED else ()
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


def launches_of(pairs: int, gate_up: torch.Tensor, down: torch.Tensor) -> tuple[ExpertsLaunch, ExpertsLaunch]:
    """For both products of so many pairs. Their tiles hold as many of them: pairs are placed once."""
    up, way_down = ExpertsLaunch.of(pairs, gate_up), ExpertsLaunch.of(pairs, down)
    if way_down.pairs == up.pairs:
        return up, way_down
    alike = [launch for _, launch in _found_for(tuple(down.shape)) if launch[0] == up.pairs]
    if alike:
        return up, ExpertsLaunch(*alike[-1])
    sound = ExpertsLaunch.sound(pairs, len(down), down.element_size(), shared_bytes(down.device))
    return sound, sound


@cache
def _found_for(shape: tuple[int, ...]) -> tuple[tuple[int, tuple[int, int, int, int, int]], ...]:
    """The table's for a weight of this shape, or for the most similar one at as many pairs an expert; nothing where
    rows or columns of each differ by more than a factor of two."""

    def factors(other: tuple[int, ...]) -> list[float]:
        return [max(mine, theirs) / min(mine, theirs) for mine, theirs in zip(shape[1:], other[1:], strict=True)]

    nearest = shape if shape in TABLE else min(TABLE, key=lambda other: math.prod(factors(other)))
    if max(factors(nearest)) > _MOST_UNLIKE:
        return ()
    return tuple((most * shape[0] // nearest[0], launch) for most, launch in TABLE[nearest])


class Pairs(NamedTuple):
    """The pairs of a step and how programs find them.

    experts: [tokens, choices] int32; places: where they are placed, in tiles of as many as a program has.
    """

    experts: torch.Tensor
    form: Form
    places: Places | None

    @classmethod
    def of(cls, experts: torch.Tensor, down: torch.Tensor, tile: int, form: Form | None = None) -> Pairs:
        """down: the experts' way down, [experts, hidden_size, width]."""
        form = form or form_of(len(experts), down)
        return cls(experts, form, place_pairs(experts, len(down), tile) if form == "placed" else None)

    @property
    def tiles(self) -> int:
        """That there can be: programs for each piece of an expert's rows."""
        return self.experts.numel() if self.places is None else len(self.places.owners)


def form_of(tokens: int, down: torch.Tensor) -> Form:
    """So few tokens as are alone hardly share an expert but the one that all have; small experts come from the L2 cache
    the second time (H200, Qwen3.5's: at width 512 as fast as placed for 3 tokens, at width 64 for 8). More are found
    while a program for each pair is hardly more programs than there are tiles (placed ones are as fast at 16 tokens, up
    to 9 % faster at 32 of width 64, and 1 % slower at 16 to 32 of width 768; 2026-11-22).
    """
    if tokens <= (_ALONE_TOKENS_SMALL if down[0].nbytes <= _SMALL_EXPERT else _ALONE_TOKENS):
        return "alone"
    return "found" if tokens <= FOUND_TOKENS else "placed"


def expert_product(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    output: torch.Tensor,
    pairs: Pairs,
    *,
    launch: ExpertsLaunch,
    gated: bool,
) -> None:
    """Into `output` the product of each pair with its expert's weight. pairs: of tiles as the launch has them.

    gated: from tokens, inputs [tokens, input_size], to pairs, output [tokens * choices, size]; weight
    [experts, 2 * size, input_size] is the gate above what it gates, and the result silu(gate) * up. Else from pairs to
    pairs, with weight [experts, size, input_size].
    """
    (rows, input_size), (tokens, choices) = weight.shape[1:], pairs.experts.shape
    places = pairs.places
    # One size serves all that are found unless asked otherwise: each is compiled.
    most_tokens = triton.next_power_of_2(max(tokens, FOUND_TOKENS)) if pairs.form == "found" else FOUND_TOKENS
    overlap = overlaps(weight.device)
    _expert_product_kernel[(triton.cdiv(rows, launch.rows), pairs.tiles)](
        inputs,
        weight,
        output,
        pairs.experts,
        *((places.pairs, places.owners, places.filled) if places else (pairs.experts,) * 3),
        tokens,
        OUTPUT=output.shape[1],
        INPUT=input_size,
        CHOICES=choices,
        MOST_TOKENS=most_tokens,
        PAIRS=launch.pairs,
        ROWS=launch.rows,
        COLUMNS=launch.columns,
        STAGES=launch.stages,
        FORM=pairs.form,
        GATED=gated,
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
        activated = torch.empty(tokens * choices, model.expert_width, dtype=dtype, device="meta")
        output = torch.empty(tokens * choices, model.hidden_size, dtype=dtype, device="meta")
        chosen = torch.empty(tokens, choices, dtype=torch.int32, device="meta")

        def launch() -> None:
            up, way_down = launches_of(chosen.numel(), gate_up, down)
            pairs = Pairs.of(chosen, down, up.pairs)
            expert_product(hidden, gate_up, activated, pairs, launch=up, gated=True)
            expert_product(activated, down, output, pairs, launch=way_down, gated=False)

        return launch

    tokens = [1, *(each * experts // choices for each in ((1, 32, 64) if dtype.itemsize == 2 else (1,)))]
    if capability(gate_up.device) == _TUNED:
        tokens += [most // choices for weight in (gate_up, down) for most, _ in _found_for(tuple(weight.shape))]
    return [case(each) for each in tokens]
