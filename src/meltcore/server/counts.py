"""What a front counts, in its row of the board. Counting is plain arithmetic, for some of it happens at every token."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from meltcore.engine.messages import EngineStats, RequestTimes
from meltcore.server.board import Board
from meltcore.server.generation import Choice

_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)

# Name, help, upper bounds in seconds.
HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "Arrival to the step that made the first token", _REQUEST_BOUNDS_S),
    ("inter_token_latency_seconds", "Time between the steps that made two tokens of a request", _TOKEN_BOUNDS_S),
    ("e2e_request_latency_seconds", "Arrival to the last token, of finished requests", _REQUEST_BOUNDS_S),
    ("request_queue_time_seconds", "Arrival to first being scheduled, of finished requests", _REQUEST_BOUNDS_S),
    ("request_prefill_time_seconds", "First scheduled to first token, of finished requests", _REQUEST_BOUNDS_S),
    ("request_decode_time_seconds", "First token to last, of finished requests", _REQUEST_BOUNDS_S),
)
REJECTIONS = ("queue_full", "loading", "draining", "dead")
_PLAIN = (
    *("accepted", "finished", "aborted", "failed", "in_flight", "in_flight_peak", "waiting_prompt_tokens"),
    *("success_stop", "success_length", "prompt_tokens", "generation_tokens", "log_lines_dropped"),
    *("connections_closed", "cpu_s", "engine_sign_s"),
    *(f"rejected_{reason}" for reason in REJECTIONS),
)
_STATS = tuple(f"engine_{field}" for field in ("at_s", *EngineStats.__struct_fields__))


def _histogram_columns() -> Iterator[str]:
    for name, _, bounds in HISTOGRAMS:
        yield from (f"{name}/{at}" for at in range(len(bounds) + 1))
        yield f"{name}/sum"


NAMES = (*_PLAIN, *_STATS, *_histogram_columns())


class Histogram:
    """Counts of values by upper bound, kept one a bound. Values in seconds."""

    def __init__(self, board: Board, row: int, name: str, bounds: Sequence[float]) -> None:
        self._board = board
        self._row = board.rows[row]
        self._bounds = bounds
        self._first = board.column[f"{name}/0"]
        self._sum = board.column[f"{name}/sum"]

    def observe(self, value_s: float, times: int = 1) -> None:
        self._row[self._first + bisect.bisect_left(self._bounds, value_s)] += times
        self._row[self._sum] += value_s * times

    def totals(self) -> tuple[list[tuple[str, float]], float]:
        """Over all fronts: Prometheus' cumulative (`le`, count) pairs, and the sum of the values."""
        buckets = []
        total = 0.0
        for at, bound in enumerate([*map(str, self._bounds), "+Inf"], self._first):
            total += sum(row[at] for row in self._board.rows)
            buckets.append((bound, total))
        return buckets, sum(row[self._sum] for row in self._board.rows)


class Counts:
    """One front's row, and the sums over all fronts. Without a board: the only front of a server."""

    def __init__(self, board: Board | None = None, front: int = 0) -> None:
        self.board = board or Board(NAMES, 1)
        self._row = self.board.rows[front]
        self._column = self.board.column
        self._stats_at = self._column[_STATS[0]]
        self.histograms = {name: Histogram(self.board, front, name, bounds) for name, _, bounds in HISTOGRAMS}
        self.time_to_first_token = self.histograms["time_to_first_token_seconds"]
        self.inter_token_latency = self.histograms["inter_token_latency_seconds"]

    def add(self, name: str, amount: float = 1) -> None:
        self._row[self._column[name]] += amount

    def set(self, name: str, value: float) -> None:
        self._row[self._column[name]] = value

    def own(self, name: str) -> float:
        """This front's value."""
        return self._row[self._column[name]]

    def total(self, name: str) -> float:
        """The whole server's value."""
        return self.board.total(name)

    def note_in_flight(self, count: int) -> None:
        """This front has `count` requests in flight now. The peak is of the whole server, as seen by who raises it."""
        self.set("in_flight", count)
        self.set("in_flight_peak", max(self.own("in_flight_peak"), self.total("in_flight")))

    def note_step(self, stats: EngineStats, ended_s: float) -> None:
        """The engine's state after a step of which this front has had outputs."""
        self.set("engine_sign_s", time.monotonic())
        self.note_cpu()
        self._row[self._stats_at] = ended_s
        for at, value in enumerate(msgspec.structs.astuple(stats), self._stats_at + 1):
            self._row[at] = value

    def note_cpu(self) -> None:
        self.set("cpu_s", time.process_time())

    def engine(self) -> EngineStats:
        """The newest state of the engine that any front knows."""
        newest = max(self.board.rows, key=lambda row: row[self._stats_at])
        values = newest[self._stats_at + 1 : self._stats_at + len(_STATS)]
        return EngineStats(**dict[str, Any](zip(EngineStats.__struct_fields__, values, strict=True)))

    def finish(self, choice: Choice, times: RequestTimes | None, now_s: float) -> None:
        """Count one whole answer. The engine's own times are there only where the engine ended it."""
        self.add(f"success_{choice.finish_reason or 'stop'}")
        self.add("prompt_tokens", choice.prompt_tokens)
        self.histograms["e2e_request_latency_seconds"].observe(now_s - choice.generation.arrived_s)
        if choice.first_token_s is not None:
            self.histograms["request_decode_time_seconds"].observe(now_s - choice.first_token_s)
        if times is not None:
            self.histograms["request_queue_time_seconds"].observe(times.scheduled_s - times.arrived_s)
            self.histograms["request_prefill_time_seconds"].observe(times.first_token_s - times.scheduled_s)
