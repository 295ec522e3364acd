"""The rows of a tuning for console and page: only columns that some point has a value of."""

from __future__ import annotations

from collections.abc import Callable

from meltcore.results.tuning import Tuning, TuningPoint, gain
from meltcore.results.wording import NOT_MEASURED, change, number, percent

_Column = tuple[str, Callable[[TuningPoint], object | None], Callable[[TuningPoint], str]]

_COLUMNS: tuple[_Column, ...] = (
    ("output\ntok/s", lambda p: p.output_tokens_per_s, lambda p: number(p.output_tokens_per_s)),
    ("TTFT\np50 ms", lambda p: p.ttft_ms, lambda p: number(p.ttft_ms)),
    ("ITL\np50 ms", lambda p: p.itl_ms, lambda p: number(p.itl_ms)),
    ("within\nlimits", lambda p: p.within_limits, lambda p: percent(p.within_limits)),
    ("ran at\nonce", lambda p: p.running_peak, lambda p: _count(p.running_peak)),
    ("preempted", lambda p: p.preemptions, lambda p: _count(p.preemptions)),
    ("right", lambda p: p.answers, lambda p: f"{p.answers.right}/{p.answers.asked}" if p.answers else NOT_MEASURED),
    ("same\ntext", lambda p: p.answers, lambda p: str(p.answers.same_text) if p.answers else NOT_MEASURED),
    (
        "logprobs\napart,\nmean",
        lambda p: p.answers and p.answers.logprob_mean,
        lambda p: _small(p.answers.logprob_mean if p.answers else None),
    ),
    (
        "logprobs\napart,\nmost",
        lambda p: p.answers and p.answers.logprob_most,
        lambda p: _small(p.answers.logprob_most if p.answers else None),
    ),
    ("ready\ns", lambda p: p.ready_s, lambda p: number(p.ready_s)),
)


def table_of(found: Tuning) -> tuple[list[str], list[tuple[list[str], str, str]]]:
    """Heads, and a row a point: its cells, its mark ("knee", "best", "did not run" or ""), and why it did not run."""
    columns = [
        column for column in _columns(found.shipped) if any(column[1](point) is not None for point in found.points)
    ]
    heads = ["setting", *(name for name, _, _ in columns), ""]
    rows = []
    for place, point in enumerate(found.points):
        cells = [setting_of(point), *(write(point) for _, _, write in columns)]
        rows.append((cells, _mark(found, place), point.why))
    return heads, rows


def _columns(shipped: TuningPoint | None) -> list[_Column]:
    """All of them; the gain is counted from the server as it is shipped, and stands beside the rate."""
    gained: _Column = ("gain", lambda p: gain(p, shipped), lambda p: change(gain(p, shipped)))
    return [_COLUMNS[0], gained, *_COLUMNS[1:]]


def setting_of(point: TuningPoint) -> str:
    """{"seqs": 32, "tokens": 2048} as "seqs 32, tokens 2,048"; a single word as it is; none as "as shipped"."""
    if not point.settings:
        return "as shipped"
    if list(point.settings) == ["precision"]:
        return str(point.settings["precision"])
    return ", ".join(
        f"{name} {value:,}" if isinstance(value, int) else f"{name} {value}" for name, value in point.settings.items()
    )


def _mark(found: Tuning, place: int) -> str:
    if place == found.knee:
        return "knee"
    if place == found.best:
        return "best"
    return "" if found.points[place].ok else "did not run" if found.points[place].ready_s is None else "failed"


def _count(value: int | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,}"


def _small(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:.2g}"
