"""What rank 0 and the other ranks of a group say to each other (msgpack over ZeroMQ); results travel by collectives."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from meltcore.engine.batch import Step
from meltcore.engine.memory import MemoryPlan
from meltcore.engine.runner import Layout
from meltcore.engine.warm_up import Limits


def rank_address(folder: Path, rank: int) -> str:
    """Where rank 0 speaks to `rank`; 0 for where all others speak to rank 0. Rank 0 binds them all."""
    return f"ipc://{folder}/rank-{rank}.sock"


class Choices(NamedTuple):
    """The sequences of a step that do not just take the likeliest token, as indices among those that sample.

    drawn: from all tokens, by temperature alone; each rank draws from its own tokens, and the best of all wins.
    full: what needs a whole row of logits; rank 0 alone chooses. The `_rows` are theirs in the table.
    """

    drawn: list[int]
    drawn_rows: list[int]
    seeds: list[int]
    positions: list[int]
    temperatures: list[float]
    full: list[int]
    full_rows: list[int]


# --- rank 0 to the others ----------------------------------------------------------------------------------------


class Settle(msgspec.Struct, tag="settle"):
    """What all ranks can hold: lay out caches and tables for it."""

    layout: Layout


class RunStep(msgspec.Struct, tag="step"):
    """Compute a step. Numbers count up from 1."""

    number: int
    step: Step
    choices: Choices


class CompileKernels(msgspec.Struct, tag="compile"):
    """Compile what serving launches, each for itself."""

    limits: Limits


class CaptureGraphs(msgspec.Struct, tag="graphs"):
    """Record decode steps as graphs, together."""


class Leave(msgspec.Struct, tag="leave"):
    """The engine closes: leave the group together."""


ToRank = Settle | RunStep | CompileKernels | CaptureGraphs | Leave


# --- the others to rank 0 ----------------------------------------------------------------------------------------


class RankStage(msgspec.Struct, tag="stage", frozen=True):
    """A rank has started, or is done with laying out what it was told."""

    rank: int
    stage: Literal["started", "settled"]


class RankLoaded(msgspec.Struct, tag="loaded", frozen=True):
    rank: int
    plan: MemoryPlan


class RankFailed(msgspec.Struct, tag="failed", frozen=True):
    """A rank cannot start or go on; its process ends after this."""

    rank: int
    message: str


FromRank = RankStage | RankLoaded | RankFailed


def _encode_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} cannot be sent to a rank")
    return array.dtype.str, array.shape, array.tobytes()


def _decode_array(kind: type, parts: Any) -> np.ndarray:
    dtype, shape, content = parts
    return np.frombuffer(bytearray(content), dtype=dtype).reshape(shape)  # one that may be written to


encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
to_rank_decoder = msgspec.msgpack.Decoder(ToRank, dec_hook=_decode_array)
from_rank_decoder = msgspec.msgpack.Decoder(FromRank)
