"""Defines the messages between rank 0 and the other ranks (msgpack over ZeroMQ). Collectives exchange the results."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np

from meltcore.engine.core.batch import Step
from meltcore.engine.memory.memory_plan import MemoryPlan
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.warm_up import StepLimits


def rank_address(folder: Path, rank: int) -> str:
    """Return the address on which `rank` receives messages. Rank 0 binds the addresses of all ranks."""
    return f"ipc://{folder}/rank-{rank}.sock"


class SamplingStep(NamedTuple):
    """Lists the sequences of a step that are not greedy, as indices among the sequences that sample.

    Args:
        shard_indices: sequences that sample by temperature alone. Each rank samples from its shard of the vocabulary,
            and the best candidate wins.
        gathered_indices: sequences that need a whole row of logits. Only rank 0 samples them.
        shard_rows: page-table rows of the sequences in `shard_indices`.
        gathered_rows: page-table rows of the sequences in `gathered_indices`.
    """

    shard_indices: list[int]
    shard_rows: list[int]
    seeds: list[int]
    positions: list[int]
    temperatures: list[float]
    gathered_indices: list[int]
    gathered_rows: list[int]


# --- rank 0 to the others ----------------------------------------------------------------------------------------


class Allocate(msgspec.Struct, tag="allocate"):
    """Asks a rank to allocate caches and tables of these sizes, which fit on all ranks."""

    config: ModelRunnerConfig


class RunStep(msgspec.Struct, tag="step"):
    """Asks a rank to compute a step. Steps are numbered from 1."""

    step_number: int
    step: Step
    sampling: SamplingStep


class CompileKernels(msgspec.Struct, tag="compile"):
    """Asks a rank to compile the kernels that serving launches. Each rank compiles its own kernels."""

    limits: StepLimits


class CaptureGraphs(msgspec.Struct, tag="graphs"):
    """Asks a rank to capture CUDA graphs together with all other ranks."""


class LeaveGroup(msgspec.Struct, tag="leave"):
    """Asks a rank to destroy the process group together with all other ranks, because the engine closes."""


ToRank = Allocate | RunStep | CompileKernels | CaptureGraphs | LeaveGroup


# --- the others to rank 0 ----------------------------------------------------------------------------------------


class RankStage(msgspec.Struct, tag="stage", frozen=True):
    """Reports that a rank has started, or that it has allocated its caches and tables."""

    rank: int
    stage: Literal["started", "allocated"]


class RankLoaded(msgspec.Struct, tag="loaded", frozen=True):
    """Reports that a rank has loaded its weights. `plan` is the rank's memory plan."""

    rank: int
    plan: MemoryPlan


class RankFailed(msgspec.Struct, tag="failed", frozen=True):
    """Reports that a rank cannot start or continue. The rank's process ends after this message."""

    rank: int
    message: str


FromRank = RankStage | RankLoaded | RankFailed


def _encode_array(array: Any) -> tuple[str, tuple[int, ...], bytes]:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{type(array).__name__} cannot be sent to a rank")
    return array.dtype.str, array.shape, array.tobytes()


def _decode_array(_type: type, encoded: Any) -> np.ndarray:
    dtype, shape, data = encoded
    return np.frombuffer(bytearray(data), dtype=dtype).reshape(shape)  # a bytearray is writable


encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
decoder_on_rank = msgspec.msgpack.Decoder(ToRank, dec_hook=_decode_array)
decoder_on_driver = msgspec.msgpack.Decoder(FromRank)
