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
    *("connections_closed", "cpu_s"),
    *(f"rejected_{reason}" for reason in REJECTIONS),
)
# Of each replica: what it has open, when it last gave a sign of life, whether it has died (in the first front's row),
# and the engine's own numbers with the time of the step that they are of.
_OPEN = ("requests", "tokens", "sign_s", "died")
_STATS = ("stats_at_s", *EngineStats.__struct_fields__)


def _histogram_columns() -> Iterator[str]:
    for name, _, bounds in HISTOGRAMS:
        yield from (f"{name}/{at}" for at in range(len(bounds) + 1))
        yield f"{name}/sum"


def columns(replicas: int) -> tuple[str, ...]:
    """The columns of the board of a server with so many replicas."""
    of_replicas = (f"replica_{name}/{at}" for at in range(replicas) for name in (*_OPEN, *_STATS))
    return (*_PLAIN, *of_replicas, *_histogram_columns())


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

    def __init__(self, board: Board | None = None, front: int = 0, replicas: int = 1) -> None:
        self.board = board or Board(columns(replicas), 1)
        self.replicas = replicas
        self._row = self.board.rows[front]
        self._column = self.board.column
        self._sign_at, self._died_at, self._stats_at = (
            [self._column[f"replica_{name}/{at}"] for at in range(replicas)] for name in ("sign_s", "died", _STATS[0])
        )
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

    def note_step(self, stats: EngineStats, ended_s: float, replica: int = 0) -> None:
        """A replica's state after a step of which this front has had outputs."""
        self._row[self._sign_at[replica]] = time.monotonic()
        self.note_cpu()
        first = self._stats_at[replica]
        self._row[first] = ended_s
        for at, value in enumerate(msgspec.structs.astuple(stats), first + 1):
            self._row[at] = value

    def note_cpu(self) -> None:
        self.set("cpu_s", time.process_time())

    def engine(self, replica: int) -> EngineStats:
        """The newest state of a replica that any front knows. A dead one holds nothing; what it has counted stays."""
        first = self._stats_at[replica]
        newest = max(self.board.rows, key=lambda row: row[first])
        values = dict(zip(EngineStats.__struct_fields__, newest[first + 1 : first + len(_STATS)], strict=True))
        if self._died(replica):
            values = {name: value if name.endswith("_total") else 0.0 for name, value in values.items()}
        return EngineStats(**dict[str, Any](values))

    def engines(self) -> EngineStats:
        """The sums over all replicas."""
        each = [msgspec.structs.astuple(self.engine(replica)) for replica in range(self.replicas)]
        return EngineStats(*map(sum, zip(*each, strict=True)))

    # --- replicas

    def living(self) -> list[int]:
        """The replicas that work; all of them until one has died."""
        return [replica for replica in range(self.replicas) if not self._died(replica)]

    def give(self, replica: int, tokens: int) -> None:
        """A request of `tokens` to do goes to `replica`. Where it was idle, the waiting for a sign of it starts now."""
        if not self.open_requests(replica):
            self._row[self._sign_at[replica]] = time.monotonic()
        self.add(f"replica_requests/{replica}")
        self.add(f"replica_tokens/{replica}", tokens)

    def take_back(self, replica: int, tokens: int) -> None:
        """The request has ended, however it did."""
        self.add(f"replica_requests/{replica}", -1)
        self.add(f"replica_tokens/{replica}", -tokens)

    def open_requests(self, replica: int) -> float:
        """What `replica` has open of all fronts."""
        return self.total(f"replica_requests/{replica}")

    def open_tokens(self, replica: int) -> float:
        """Prompts and allowed answers of what `replica` has open of all fronts."""
        return self.total(f"replica_tokens/{replica}")

    def sign_s(self, replica: int) -> float:
        """When any front last had a sign of `replica`, in monotonic seconds."""
        at = self._sign_at[replica]
        return max(row[at] for row in self.board.rows)

    def note_death(self, replica: int) -> None:
        """For the first front, which is the one that sees it."""
        self.board.rows[0][self._died_at[replica]] = 1

    def forget_open(self, front: int) -> None:
        """Nothing is open at `front` any more: it has died."""
        row = self.board.rows[front]
        for name in ("in_flight", "waiting_prompt_tokens"):
            row[self._column[name]] = 0
        for replica in range(self.replicas):
            row[self._column[f"replica_requests/{replica}"]] = row[self._column[f"replica_tokens/{replica}"]] = 0

    def _died(self, replica: int) -> bool:
        return bool(self.board.rows[0][self._died_at[replica]])

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
