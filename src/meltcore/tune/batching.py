"""The sweep of concurrent sequences and batched-token budgets, with the knee marked.

The first start is of the server as it is shipped, which every gain is counted from. The knee is the smallest setting
within 2 % of the best output rate among those that meet the latency limits: what lies beyond it costs memory and
latency and buys nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meltcore.load.config import LoadConfig
from meltcore.results.tuning import TuningPoint, gain, shipped_point
from meltcore.results.wording import change, number
from meltcore.tune.attempt import Bench, attempt

KNEE_SHARE = 0.98
WITHIN_LIMITS = 0.95  # of the requests must meet every limit


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Every pair of `seqs` and `tokens` is tried; an empty `tokens` leaves the budget to the server."""

    seqs: tuple[int, ...]
    tokens: tuple[int, ...]
    load: LoadConfig


def sweep(bench: Bench, wanted: Sweep) -> list[TuningPoint]:
    """The server as it is shipped, then one start a pair, in the order of the budgets, then of the sequences."""
    settings: list[dict[str, int | str]] = [
        {"seqs": seqs, "tokens": tokens} for tokens in wanted.tokens for seqs in wanted.seqs
    ] or [{"seqs": seqs} for seqs in wanted.seqs]
    return [attempt(bench, each, wanted.load) for each in ({}, *settings)]


def best_and_knee(points: Sequence[TuningPoint]) -> tuple[int | None, int | None]:
    """Places of the fastest setting and of the knee, among those that ran and met the limits."""
    rates = {place: point.output_tokens_per_s or 0.0 for place, point in enumerate(points) if _eligible(point)}
    if not rates:
        return None, None
    best = max(rates, key=lambda place: rates[place])
    near = [place for place, rate in rates.items() if rate >= KNEE_SHARE * rates[best]]
    return best, min(near, key=lambda place: _size(points[place]))


def finding(points: Sequence[TuningPoint], best: int | None, knee: int | None) -> str:
    """The answer in a sentence, and what it gains on the server as it is shipped in another."""
    return f"{_answer(points, best, knee)}{_gained(points, best, knee)}"


def _answer(points: Sequence[TuningPoint], best: int | None, knee: int | None) -> str:
    if best is None or knee is None:
        tried = [point for point in points if point.settings]
        ran = sum(point.ok for point in tried)
        if not ran:
            return "No setting ran."
        return f"No setting meets the limits: {ran} of {len(tried)} ran, none of them within the latency limits."
    if best == knee:
        rate = number(points[best].output_tokens_per_s)
        return f"{describe(points[best].settings)} is the fastest, and nothing smaller comes near: {rate} output tok/s."
    top, chosen = points[best].output_tokens_per_s or 0.0, points[knee].output_tokens_per_s or 0.0
    return (
        f"The knee is {describe(points[knee].settings)}: {number(chosen)} output tok/s, {100 * chosen / top:.1f} % of "
        f"the best ({describe(points[best].settings)}: {number(top)})."
    )


def _gained(points: Sequence[TuningPoint], best: int | None, knee: int | None) -> str:
    shipped = shipped_point(points)
    if shipped is None or best is None or knee is None:
        return ""
    rate = number(shipped.output_tokens_per_s)
    gains = [change(gain(points[place], shipped)) for place in dict.fromkeys((knee, best))]
    words = gains[0] if len(gains) == 1 else f"{gains[0]} at the knee, {gains[1]} at the best"
    return f" Against the server as it is shipped ({rate} output tok/s): {words}."


def describe(settings: dict[str, int | str]) -> str:
    """{"seqs": 32, "tokens": 2048} as "32 sequences, 2,048 tokens a step"."""
    words = {"seqs": "sequences", "tokens": "tokens a step", "length": "tokens of context"}
    return ", ".join(
        f"{value:,} {words[name]}" if isinstance(value, int) else str(value) for name, value in settings.items()
    )


def _eligible(point: TuningPoint) -> bool:
    if not point.settings:
        return False  # what the server comes with is no setting to choose
    return point.ok and (point.within_limits is None or point.within_limits >= WITHIN_LIMITS)


def _size(point: TuningPoint) -> tuple[int, ...]:
    return tuple(int(point.settings[name]) for name in ("seqs", "tokens") if name in point.settings)
