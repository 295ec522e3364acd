"""The result of `meltcore compare-backends`: one run per backend and set-up, the best of each, and nine aspects."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from meltcore.measure.documents.schema import Envelope, LevelResult
from meltcore.measure.documents.verdicts import CUT_SHORT

# How a backend is started. `single` is one server on one GPU, in which both sessions and batching are measured.
StartKind = Literal["single", "quantized", "data-parallel", "split", "load-balanced"]
SetUp = Literal["sessions", "quantized", "batching", "data-parallel", "split", "load-balanced"]
START_OF: dict[SetUp, StartKind] = {
    "sessions": "single",
    "quantized": "quantized",
    "batching": "single",
    "data-parallel": "data-parallel",
    "split": "split",
    "load-balanced": "load-balanced",
}
MOST_FAILED = 0.01  # ratio of a level's requests that may fail; random weights give answers without text


class BackendRun(msgspec.Struct, kw_only=True):
    """One start of a backend under load.

    `reason` says why it was not measured, or not to its end; `levels` holds what was measured. `lacks` lists settings
    of the comparison that the backend has no flag for. `ready_s` counts from the process's start to the first answer,
    or None for a server that ran already. Memory is the peak of all GPUs under load, and of all processes after it.
    """

    backend: str
    start: StartKind
    model: str
    reason: str = ""
    command: str = ""
    version: str | None = None
    replicas: int = 1
    lacks: list[str] = msgspec.field(default_factory=list)
    ready_s: float | None = None
    levels: list[LevelResult] = msgspec.field(default_factory=list)
    gpu_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    notes: list[str] = msgspec.field(default_factory=list)

    def level(self, concurrency: int) -> LevelResult | None:
        """Return the level of this concurrency where at most MOST_FAILED of its requests failed, else None."""
        level = self._completed_level(concurrency)
        return level if level is not None and level.failed <= MOST_FAILED * level.requests else None

    def failure(self, concurrency: int) -> str:
        """Return the failed share of a level that does not count, and its most frequent reason, or "" for others."""
        level = self._completed_level(concurrency)
        if level is None or level.failed <= MOST_FAILED * level.requests:
            return ""
        reason = max(level.failures, key=lambda each: level.failures[each], default="no reason was recorded")
        return f"failed {100 * level.failed / level.requests:.0f} %: {reason}"

    def _completed_level(self, concurrency: int) -> LevelResult | None:
        """Return the level of this concurrency that was loaded to its end, or None."""
        whole = (each for each in self.levels if each.verdict not in CUT_SHORT)
        return next((each for each in whole if each.concurrency == concurrency), None)


class BestBackend(msgspec.Struct, kw_only=True):
    """The fastest backend in a set-up, or in all set-ups of a model (`set_up` is empty).

    `output_tokens_per_s` is the geometric mean over `levels`. `backend` is None where none leads, and `reason` says
    why.
    """

    model: str
    set_up: str
    levels: list[int]
    backend: str | None = None
    output_tokens_per_s: float | None = None
    reason: str = ""


class Aspect(msgspec.Struct, kw_only=True):
    """One aspect, what of it was measured, and by backend the finding, or "not measured" with its reason."""

    name: str
    measured_as: str
    findings: dict[str, str]


class BackendComparison(Envelope, kw_only=True, tag_field="document", tag="backend-comparison"):
    """The same load on several backends. `settings` are equal for all; `load` is every run's.

    Levels up to `most_sessions` are several sessions on one server, those above are batching.
    """

    model: str
    backends: list[str]
    set_ups: list[SetUp]
    most_sessions: int
    load: dict[str, Any]
    runs: list[BackendRun] = msgspec.field(default_factory=list)
    best: list[BestBackend] = msgspec.field(default_factory=list)
    aspects: list[Aspect] = msgspec.field(default_factory=list)

    def run(self, backend: str, start: StartKind) -> BackendRun | None:
        """Return the run of a backend in a kind of start, or None before it was made."""
        return next((run for run in self.runs if (run.backend, run.start) == (backend, start)), None)

    def levels_of(self, set_up: SetUp) -> list[int]:
        """Return the concurrencies that a set-up is measured at."""
        levels = [int(level) for level in self.load["concurrency"]]
        if set_up == "sessions":
            return [level for level in levels if level <= self.most_sessions]
        return [level for level in levels if set_up != "batching" or level > self.most_sessions]
