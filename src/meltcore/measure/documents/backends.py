"""Defines the result of `meltcore compare-backends`: one run per backend and set-up, and the conclusions."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from meltcore.measure.documents.schema import Envelope, LevelResult
from meltcore.measure.documents.verdicts import CUT_SHORT

# How a backend is started. `single` is one server on one GPU, in which both sessions and batching are measured.
StartKind = Literal["single", "quantized", "data-parallel", "split", "load-balanced"]
SetUp = Literal["sessions", "quantized", "batching", "data-parallel", "split", "load-balanced"]
START_KIND_BY_SET_UP: dict[SetUp, StartKind] = {
    "sessions": "single",
    "quantized": "quantized",
    "batching": "single",
    "data-parallel": "data-parallel",
    "split": "split",
    "load-balanced": "load-balanced",
}
MAX_FAILED_RATIO = 0.01  # ratio of a level's requests that may fail; random weights give answers without text


class BackendRun(msgspec.Struct, kw_only=True):
    """One start of a backend under load.

    `reason` says why the start was not measured, or why its load stopped early. `levels` holds the measured levels.
    `lacks` lists the settings of the comparison for which the backend has no flag. `ready_s` is the time from the start
    of the process to the first answer, or None for a server that was running already. `gpu_memory_bytes` is the peak of
    all GPUs under load. `host_memory_bytes` is the memory of all processes after the load.
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
        """Return the level of this concurrency.

        Returns None if the load of the level stopped early, or if more than MAX_FAILED_RATIO of its requests failed.
        """
        level = self._completed_level(concurrency)
        return level if level is not None and level.failed <= MAX_FAILED_RATIO * level.requests else None

    def failure(self, concurrency: int) -> str:
        """Return the share of failed requests and the most frequent reason as text, if too many requests failed.

        Returns "" if few enough requests failed, or if the load of the level stopped early.
        """
        level = self._completed_level(concurrency)
        if level is None or level.failed <= MAX_FAILED_RATIO * level.requests:
            return ""
        reason = max(level.failures, key=lambda each: level.failures[each], default="no reason was recorded")
        return f"failed {100 * level.failed / level.requests:.0f} %: {reason}"

    def _completed_level(self, concurrency: int) -> LevelResult | None:
        """Return the level of this concurrency. Returns None if its load stopped early."""
        completed_levels = (each for each in self.levels if each.verdict not in CUT_SHORT)
        return next((each for each in completed_levels if each.concurrency == concurrency), None)


class BestBackend(msgspec.Struct, kw_only=True):
    """The fastest backend in a set-up. An empty `set_up` means all set-ups of a model.

    `output_tokens_per_s` is the geometric mean over `levels`. If no backend leads, `backend` is None and `reason` says
    why.
    """

    model: str
    set_up: str
    levels: list[int]
    backend: str | None = None
    output_tokens_per_s: float | None = None
    reason: str = ""


class Aspect(msgspec.Struct, kw_only=True):
    """One of the nine aspects: what was measured, and the finding for each backend.

    A finding is "not measured", with its reason, if the runs show nothing about the aspect.
    """

    name: str
    measured_as: str
    findings: dict[str, str]


class BackendComparison(Envelope, kw_only=True, tag_field="document", tag="backend-comparison"):
    """A comparison of several backends, which all get the same `settings` and the same `load`.

    Levels with a concurrency of at most `most_sessions` measure several sessions on one server. Higher levels measure
    batching.
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
        """Return the run of a backend in one kind of start. Returns None if that run has not been made yet."""
        return next((run for run in self.runs if (run.backend, run.start) == (backend, start)), None)

    def levels_of(self, set_up: SetUp) -> list[int]:
        """Return the concurrencies that count for a set-up."""
        levels = [int(level) for level in self.load["concurrency"]]
        if set_up == "sessions":
            return [level for level in levels if level <= self.most_sessions]
        return [level for level in levels if set_up != "batching" or level > self.most_sessions]
