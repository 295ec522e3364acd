"""What `meltcore tune` tried and found: one point a start of the server, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from meltcore.results.schema import Fingerprint

TUNING_VERSION = 1
TUNING_FILE = "tuning.json"

TuningKind = Literal["context", "batching", "precision"]


class Answers(msgspec.Struct, kw_only=True):
    """Answers of one precision beside those of the first. Shares are of all questions asked.

    `logprob_mean` and `logprob_most` are absolute differences of the log probability of the chosen token, over
    `tokens_compared` tokens: those up to the first one that differs, so both sides had the same beginning. None where
    the server gives no logprobs.
    """

    asked: int
    right: int
    failed: int
    same_text: int
    tokens_compared: int = 0
    logprob_mean: float | None = None
    logprob_most: float | None = None


class TuningPoint(msgspec.Struct, kw_only=True):
    """One start with `settings`. `ok`: it started and all that was asked of it was answered; else `why` says.

    `words` are the settings as the server's arguments; both are empty where the server ran as it is shipped.
    `within_limits` is the share of requests that met every latency limit, None where none was given.
    """

    settings: dict[str, int | str]
    words: list[str] = msgspec.field(default_factory=list)
    ok: bool
    why: str = ""
    ready_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    within_limits: float | None = None
    running_peak: int | None = None
    preemptions: int | None = None
    answers: Answers | None = None


class Fact(msgspec.Struct, kw_only=True):
    """A figure with where it comes from: found by search, reported by the server, or reckoned."""

    name: str
    value: str
    source: str


class Tuning(msgspec.Struct, kw_only=True):
    """`knee` and `best` are places in `points`, None where no point qualifies; `finding` is the answer in words."""

    tuning_version: int = TUNING_VERSION
    kind: TuningKind
    finding: str
    command: str
    taken: str
    fingerprint: Fingerprint
    load: dict[str, Any] = msgspec.field(default_factory=dict)
    limits_ms: dict[str, float] = msgspec.field(default_factory=dict)
    points: list[TuningPoint]
    best: int | None = None
    knee: int | None = None
    facts: list[Fact] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether the question has an answer: a knee within the limits, or at least one start that worked."""
        return self.knee is not None if self.kind == "batching" else any(point.ok for point in self.points)

    @property
    def shipped(self) -> TuningPoint | None:
        return shipped_point(self.points)


def shipped_point(points: Sequence[TuningPoint]) -> TuningPoint | None:
    """The start without any setting, which gains are counted from; None where there was none, or it did not run."""
    return next((point for point in points if not point.settings and point.ok), None)


def gain(point: TuningPoint, shipped: TuningPoint | None) -> float | None:
    """0.25 where the output rate is a quarter above the shipped one; None where either is not known."""
    if shipped is None or not shipped.output_tokens_per_s or point.output_tokens_per_s is None:
        return None
    return point.output_tokens_per_s / shipped.output_tokens_per_s - 1
