"""Defines the result of `meltcore tune`: one point per start of the server, and the conclusions from all points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from meltcore.measure.documents.schema import Fingerprint, VersionedDocument

TUNING_FILE = "tuning.json"
MIN_SLO_ATTAINMENT = 0.95  # share of requests that must meet every limit of the SLO

_LABELS = {"max_num_seqs": "seqs", "max_num_batched_tokens": "tokens", "max_model_len": "length"}

TuningKind = Literal["context", "batching", "precision"]


class AnswerComparison(msgspec.Struct, kw_only=True):
    """Compares the answers of one precision with the answers of the first precision.

    Of `asked` questions, `correct` were answered correctly, `failed` got no answer, and `identical` got the same text
    as from the first precision. `logprob_diff_*` are absolute differences of the chosen token's log probability over
    `tokens_compared` tokens. The comparison of an answer ends at the first token that differs, because the prefixes
    differ after it. The differences are None if the server returns no logprobs.
    """

    asked: int
    correct: int
    failed: int
    identical: int
    tokens_compared: int = 0
    logprob_diff_mean: float | None = None
    logprob_diff_max: float | None = None


class TuningPoint(msgspec.Struct, kw_only=True):
    """One start of the server with `settings`, which are passed as `args`.

    `settings` and `args` are empty for the server's default settings. A start is `ok` if it answered every request;
    otherwise `reason` says what happened. `slo_attainment` is the share of requests that met every latency limit, or
    None without limits.
    """

    settings: dict[str, int | str]
    args: list[str] = msgspec.field(default_factory=list)
    ok: bool
    reason: str = ""
    ready_s: float | None = None
    output_tokens_per_s: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    slo_attainment: float | None = None
    peak_running: int | None = None
    preemptions: int | None = None
    answers: AnswerComparison | None = None

    @property
    def label(self) -> str:
        """The settings in a few characters: "seqs 32, tokens 2,048", "fp8" or "default"."""
        values = (
            f"{_LABELS.get(name, '')} {value:,}" if isinstance(value, int) else str(value)
            for name, value in self.settings.items()
        )
        return ", ".join(values) or "default"


class Fact(msgspec.Struct, kw_only=True):
    """A value and its source: found by search, reported by the server, or calculated."""

    name: str
    value: str
    source: str


class Tuning(VersionedDocument, kw_only=True, tag_field="document", tag="tuning"):
    """All points of a tuning. `finding` is the result in a sentence; `best` and `knee` are indices of `points`.

    `default_settings` are the server's defaults, as far as the server reports them.
    """

    kind: TuningKind
    finding: str
    command: str
    taken: str
    fingerprint: Fingerprint
    default_settings: dict[str, int] = msgspec.field(default_factory=dict)
    load: dict[str, Any] = msgspec.field(default_factory=dict)
    slo_ms: dict[str, float] = msgspec.field(default_factory=dict)
    points: list[TuningPoint]
    best: int | None = None
    knee: int | None = None
    facts: list[Fact] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def has_result(self) -> bool:
        """Whether there is a result: a knee that meets the SLO, or at least one start that worked."""
        return self.knee is not None if self.kind == "batching" else any(point.ok for point in self.points)

    @property
    def default(self) -> TuningPoint | None:
        """The point of the server's default settings. It is None if that start failed."""
        return default_point(self.points)


def default_point(points: Sequence[TuningPoint]) -> TuningPoint | None:
    """Return the point of the default settings, to which gains are relative.

    Returns None if the start with the default settings failed.
    """
    return next((point for point in points if not point.settings and point.ok), None)


def repeats_default(tuning: Tuning, point: TuningPoint) -> bool:
    """Return whether the settings of `point` equal the server's defaults.

    Such a point measures the defaults a second time.
    """
    return bool(point.settings) and point.settings.items() <= tuning.default_settings.items()


def gain(point: TuningPoint, default: TuningPoint | None) -> float | None:
    """Return how much the output rate of `point` exceeds the rate of `default`: 0.25 for 25 %.

    Returns None if either rate is unknown.
    """
    if default is None or not default.output_tokens_per_s or point.output_tokens_per_s is None:
        return None
    return point.output_tokens_per_s / default.output_tokens_per_s - 1
