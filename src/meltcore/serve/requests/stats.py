"""Counts statistics in shared memory, with one row of numbers per process. All processes of a server map the memory.

A process writes its own row and reads all rows. So counting takes neither a message nor a lock, and every API server
process knows the numbers of the whole server. The row of a process that dies stays, so no count is lost. Row 0 belongs
to the supervisor, the other rows belong to the API server processes.
"""

from __future__ import annotations

import bisect
import fcntl
import mmap
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import get_args

from meltcore.common.tasks import DEFAULT
from meltcore.protocol.generation import ENGINE_CELLS, EngineStats, RequestTimes
from meltcore.settings.config import PriorityClass

_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_REQUEST_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 300.0, 600.0)

# Name, help, upper bounds in seconds.
HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "Time from arrival to the step that made the first token", _REQUEST_BOUNDS_S),
    ("inter_token_latency_seconds", "Time between the steps that made two tokens of a request", _TOKEN_BOUNDS_S),
    ("e2e_request_latency_seconds", "Time from arrival to the last token of finished requests", _REQUEST_BOUNDS_S),
    ("request_queue_time_seconds", "Time from arrival to first schedule of finished requests", _REQUEST_BOUNDS_S),
    ("request_prefill_time_seconds", "Time from first schedule to first token of finished requests", _REQUEST_BOUNDS_S),
    ("request_decode_time_seconds", "Time from first token to last of finished requests", _REQUEST_BOUNDS_S),
)
QUEUE_WAIT = (
    "queue_wait_seconds",
    "Time in the queue before the engines, by class; 0 where none was needed",
    _REQUEST_BOUNDS_S,
)
EVENT_LOOP_LAG = (
    "event_loop_lag_seconds",
    "How late a timer of each API server's event loop ran",
    (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0),
)
CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)
# Why a request of a class was refused: the queue was full, or its deadline passed while it waited.
QUEUE_REFUSAL_REASONS = ("full", "deadline")
# By `sleep_level`, the weights are on the device, in host memory, or nowhere.
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
# Why a request was rejected immediately: the state of its model, or a full queue.
REJECTION_REASONS = ("queue_full", "loading", "restarting", "draining", "sleeping", "failed", "dead")
_PROCESS_COLUMNS = (
    *("connections_closed", "cpu_s", "log_lines_dropped", "api_server_deaths"),
    *("trace_spans_sent", "trace_spans_overflowed", "trace_spans_failed"),  # the last two were dropped
)
_KEY_COLUMNS = ("requests_s", "tokens_s", "refused")  # the first two, in row 0: when its buckets are full again
_MODEL_COLUMNS = (
    *("accepted", "finished", "aborted", "failed", "in_flight", "in_flight_peak", "waiting_prompt_tokens"),
    *("retried", "success_stop", "success_length", "prompt_tokens", "generation_tokens"),
    *(f"rejected_{reason}" for reason in REJECTION_REASONS),
    *("grammars_compiled", "grammars_refused", "grammars_weakened", "grammar_compile_s"),
    *("queue_requests", "queue_virtual", "queue_alive_s"),  # the last two: see FairQueue
    # Of a model that sleeps: how deep, as vLLM counts (in the supervisor's row, as all but the last one), how often it
    # woke and for how long in all, the time before which it cannot wake, and the last request that could not wait.
    *("sleep_level", "wakes", "wake_s", "wake_at_s", "wanted_s"),
    # In the supervisor's row: when an engine last began to start or will, how long the last start took that ended, and
    *("start_s", "start_took_s", "time_sliced"),  # how many engines are not the clients of MPS that they should be
    *(f"queue_{name}/{each}" for each in CLASSES for name in ("requests", "units", "head_s", "finish")),
    *(f"refused_{reason}/{each}" for each in CLASSES for reason in QUEUE_REFUSAL_REASONS),
)
# Per replica: its open requests and their tokens, when it last gave a sign of life, why it gets no requests (in the
# supervisor's row), and the engine's own statistics after the time of the step that they describe.
_REPLICA_COLUMNS = ("requests", "tokens", "last_message_s", "closed")
_ENGINE_COLUMNS = ("engine_at_s", *ENGINE_CELLS)
_MIN_START_S, _MAX_LATE_S, _MAX_START_S = 1.0, 5.0, 60.0  # of Retry-After while a model loads
# Doubles: whole numbers are exact up to 2^53, and an aligned store is never seen half done.
_CELL_BYTES = 8
_OPEN, _DRAINING, _DEAD, _ASLEEP = 0.0, 1.0, 2.0, 3.0  # a replica that is not open gets no requests


class SharedStats:
    """Rows of named numbers in shared memory, with one row per process. All numbers are 0 at first.

    Another process maps the same memory by the file descriptor `fd`.
    """

    def __init__(self, names: Sequence[str], num_rows: int, fd: int | None = None) -> None:
        """Create the memory, or map the memory of `fd`, which must have been created with the same names and rows.

        The caller keeps `fd`. A copy of it is used, and closed with the last reference to these statistics.
        """
        self.fd = os.memfd_create("meltcore-stats") if fd is None else os.dup(fd)
        weakref.finalize(self, os.close, self.fd)
        self.column = {name: index for index, name in enumerate(names)}
        if len(self.column) != len(names):
            raise ValueError("two columns have the same name")
        size = len(names) * num_rows * _CELL_BYTES
        if fd is None:
            os.ftruncate(self.fd, size)
        cells = memoryview(mmap.mmap(self.fd, size)).cast("d")
        self.rows = [cells[row * len(names) : (row + 1) * len(names)] for row in range(num_rows)]

    def locked(self) -> SharedStats:
        """Hold a lock during a `with` statement, so that all rows can be read and changed together.

        The lock does not nest. The kernel releases the lock of a process that dies.
        """
        return self

    def __enter__(self) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_EX)

    def __exit__(self, *_error: object) -> None:
        fcntl.lockf(self.fd, fcntl.LOCK_UN)


class Histogram:
    """Counts values in seconds in buckets. Each bucket has an upper bound; the last has none."""

    def __init__(self, shared: SharedStats, row: int, first: int, bounds: Sequence[float]) -> None:
        """Create a view of the histogram's columns.

        `first` is the column of the lowest bucket. The column after the last bucket has the sum of the values.
        """
        self._rows = shared.rows
        self._row = shared.rows[row]
        self._histogram_bounds = bounds
        self._first_column = first
        self._sum_column = first + len(bounds) + 1

    def observe(self, value_s: float, count: int = 1) -> None:
        """Count a value `count` times."""
        self._row[self._first_column + bisect.bisect_left(self._histogram_bounds, value_s)] += count
        self._row[self._sum_column] += value_s * count

    def totals(self) -> tuple[list[tuple[str, float]], float]:
        """Return the cumulative (`le`, count) pairs as in Prometheus, and the sum of the values, over all processes."""
        buckets = []
        total = 0.0
        for column, bound in enumerate([*map(str, self._histogram_bounds), "+Inf"], self._first_column):
            total += sum(row[column] for row in self._rows)
            buckets.append((bound, total))
        return buckets, sum(row[self._sum_column] for row in self._rows)


class _Columns:
    """Named columns of the shared rows.

    A method reads or writes the value of this process, or sums over all processes.
    """

    def __init__(self, shared: SharedStats, row: int, prefix: str) -> None:
        self.shared = shared
        self._row = shared.rows[row]
        self._column = {
            name.removeprefix(prefix): index for name, index in shared.column.items() if name.startswith(prefix)
        }

    def column(self, name: str) -> int:
        """Return the index of a named value within a row."""
        return self._column[name]

    @property
    def row(self) -> memoryview[float]:
        """The row of this process."""
        return self._row

    def add(self, name: str, delta: float = 1) -> None:
        """Add to this process's value."""
        self._row[self._column[name]] += delta

    def set(self, name: str, value: float) -> None:
        """Set this process's value."""
        self._row[self._column[name]] = value

    def local_value(self, name: str) -> float:
        """Return this process's value."""
        return self._row[self._column[name]]

    def total(self, name: str) -> float:
        """Return the sum over all processes."""
        return self._sum(self._column[name])

    def _sum(self, column: int) -> float:
        total = 0.0
        for row in self.shared.rows:  # sum() of a generator takes three times as long
            total += row[column]
        return total


class ServerStats(_Columns):
    """The statistics of a server, as one process uses them. Each model's statistics have shared memory of their own."""

    def __init__(
        self,
        replicas: Sequence[int] = (1,),
        *,
        keys: int = 0,
        num_processes: int = 1,
        process_index: int = 0,
        fds: Sequence[int] | None = None,
    ) -> None:
        """Create the view of one process, with models 0, 1 and so on.

        Args:
            replicas: number of replicas of each model.
            keys: number of API keys.
            num_processes: number of processes, each with a row.
            process_index: row of this process.
            fds: file descriptors of another process's statistics. None creates new statistics.
        """
        lag_name, _, bounds = EVENT_LOOP_LAG
        names = [f"server/{name}" for name in (*_PROCESS_COLUMNS, *_histogram_columns(lag_name, bounds))]
        names += [f"server/key_{key}/{name}" for key in range(keys) for name in _KEY_COLUMNS]
        super().__init__(SharedStats(names, num_processes, fds[0] if fds else None), process_index, "server/")
        self._process_index = process_index
        self.event_loop_lag = Histogram(self.shared, process_index, self._column[f"{lag_name}/0"], bounds)
        self._models: dict[int, ModelStats] = {}
        for model, num_replicas in enumerate(replicas):
            self.add_model(model, num_replicas, fds[1 + model] if fds else None)

    def add_model(self, model: int, replicas: int, fd: int | None = None) -> ModelStats:
        """Add a model. `fd` is the file descriptor of the shared memory that another process created for it."""
        names = [f"{model}/{name}" for name in _model_columns(replicas)]
        shared = SharedStats(names, len(self.shared.rows), fd)
        self._models[model] = ModelStats(shared, self._process_index, model, replicas)
        return self._models[model]

    def remove_model(self, model: int) -> None:
        """Remove the statistics of a model from this process."""
        del self._models[model]

    def model(self, model: int) -> ModelStats:
        """Return the statistics of a model."""
        return self._models[model]

    @property
    def models(self) -> list[ModelStats]:
        """The statistics of all models, in the order in which they were added."""
        return list(self._models.values())

    @property
    def fds(self) -> list[int]:
        """The file descriptors of the shared memory: first the server's, then one per model."""
        return [self.shared.fd, *(model.shared.fd for model in self._models.values())]

    @property
    def api_servers(self) -> int:
        """The number of API server processes."""
        return len(self.shared.rows) - 1

    def record_cpu_time(self) -> None:
        """Record this process's CPU time."""
        self.set("cpu_s", time.process_time())

    def closed_connections(self) -> list[float]:
        """Return how many connections each process has closed since the start, in the order of the rows."""
        column = self._column["connections_closed"]
        return [row[column] for row in self.shared.rows]

    def open_requests(self) -> int:
        """Return the number of accepted requests of all models that have not ended."""
        return round(sum(model.total("in_flight") for model in self.models))

    def events(self) -> float:
        """Return the number of requests plus ended connections of this process since its start."""
        return self.local_value("connections_closed") + sum(model.local_value("accepted") for model in self.models)

    def is_idle(self) -> bool:
        """Return whether this process has no request in flight."""
        return not any(model.local_value("in_flight") for model in self.models)


class ModelStats(_Columns):
    """The statistics of one model: the row of this process, and the sums over all processes."""

    def __init__(self, shared: SharedStats, process_index: int, model: int, replicas: int) -> None:
        super().__init__(shared, process_index, f"{model}/")
        self.replicas = replicas
        (
            self._request_columns,
            self._token_columns,
            self._last_message_columns,
            self._state_columns,
            self._engine_columns,
        ) = (
            [self._column[f"replica_{name}/{replica}"] for replica in range(replicas)]
            for name in (*_REPLICA_COLUMNS, _ENGINE_COLUMNS[0])
        )
        self._unconnected_replicas: set[int] = set()
        self._unanswering_replicas: set[int] = set()
        self.task = DEFAULT.name  # of the model, for the label of metrics
        self.histograms = {
            name: Histogram(shared, process_index, self._column[f"{name}/0"], bounds) for name, _, bounds in HISTOGRAMS
        }
        name, _, bounds = QUEUE_WAIT
        self.queue_waits = {
            each: Histogram(shared, process_index, self._column[f"{name}/{each}/0"], bounds) for each in CLASSES
        }
        self.time_to_first_token = self.histograms["time_to_first_token_seconds"]
        self.inter_token_latency = self.histograms["inter_token_latency_seconds"]

    def num_ended(self) -> float:
        """Return how many requests have ended, with or without success."""
        return self.total("finished") + self.total("aborted") + self.total("failed")

    def max_value(self, name: str) -> float:
        """Return the largest value of any process."""
        column = self._column[name]
        return max(row[column] for row in self.shared.rows)

    def set_in_flight(self, count: int) -> None:
        """Store this process's number of requests in flight, and the server's highest number so far."""
        self.set("in_flight", count)
        self.set("in_flight_peak", max(self.local_value("in_flight_peak"), self.total("in_flight")))

    def record_step(self, stats: EngineStats, ended_s: float, replica: int = 0) -> None:
        """Store a replica's statistics after a step that ended at `ended_s`."""
        self._row[self._last_message_columns[replica]] = time.monotonic()
        first = self._engine_columns[replica]
        self._row[first] = ended_s
        stats.write(self._row, first + 1)

    def engine(self, replica: int) -> EngineStats:
        """Return the newest statistics of a replica. If the replica is dead or asleep, only the counters remain."""
        first = self._engine_columns[replica]
        newest_row = max(self.shared.rows, key=lambda row: row[first])
        newest = EngineStats.of_cells(newest_row[first + 1 : first + len(_ENGINE_COLUMNS)])
        # An engine that sleeps sends nothing; its last message may have a request that was aborted since.
        if self.is_dead(replica) or (self._closed(replica) == _ASLEEP and not self.open_requests(replica)):
            return newest.counters()
        return newest

    def engines(self) -> EngineStats:
        """Return the engine statistics summed over all replicas."""
        cells_per_replica = [self.engine(replica).cells() for replica in range(self.replicas)]
        return EngineStats.of_cells([*map(sum, zip(*cells_per_replica, strict=True))])

    def count_wake(self, took_s: float) -> None:
        """Count a wake-up of the model. Only the supervisor calls it."""
        self.set("sleep_level", 0)
        self.add("wakes")
        self.add("wake_s", took_s)

    # --- replicas

    def live_replicas(self) -> list[int]:
        """Return the indices of the replicas to which new requests may be sent."""
        row, unconnected = self.shared.rows[0], self._unconnected_replicas
        return [
            replica
            for replica, column in enumerate(self._state_columns)
            if row[column] == _OPEN and replica not in unconnected
        ]

    def num_serving(self) -> int:
        """Return the number of replicas that accept new requests.

        Upstream servers that do not answer are not counted.
        """
        return sum(replica not in self._unanswering_replicas for replica in self.live_replicas())

    def assign(self, replica: int, tokens: int) -> None:
        """Count a request of `tokens` tokens at `replica`.

        If the replica was idle, the time limit for its next step starts now.
        """
        if not self.open_requests(replica):
            self._row[self._last_message_columns[replica]] = time.monotonic()
        self._row[self._request_columns[replica]] += 1
        self._row[self._token_columns[replica]] += tokens

    def unassign(self, replica: int, tokens: int) -> None:
        """Remove an ended request of `replica` from the counts."""
        self._row[self._request_columns[replica]] -= 1
        self._row[self._token_columns[replica]] -= tokens

    def open_requests(self, replica: int) -> float:
        """Return the number of open requests of `replica` from all API servers."""
        return self._sum(self._request_columns[replica])

    def open_tokens(self, replica: int) -> float:
        """Return the tokens of the open requests of `replica`, as `assign` has counted them."""
        return self._sum(self._token_columns[replica])

    def last_message_s(self, replica: int) -> float:
        """Return the time.monotonic() at which any process received the last message of `replica`."""
        column = self._last_message_columns[replica]
        return max(row[column] for row in self.shared.rows)

    def mark_replica_dead(self, replica: int) -> None:
        """Mark a replica as dead. Only the supervisor calls it."""
        self._close(replica, _DEAD)

    def drain_replica(self, replica: int) -> None:
        """Stop sending new requests to a replica. Its open requests continue. Only the supervisor calls this method."""
        self._close(replica, _DRAINING)

    def mark_replica_ready(self, replica: int) -> None:
        """Allow new requests to a replica. Only the supervisor calls this method."""
        self._close(replica, _OPEN)

    def mark_replica_asleep(self, replica: int) -> None:
        """Make requests wait until the replica is awake again. Only the supervisor calls this method."""
        self._close(replica, _ASLEEP)

    @property
    def is_asleep(self) -> bool:
        """Whether requests wait because every replica that could run them sleeps or is falling asleep."""
        states = [self._closed(replica) for replica in range(self.replicas)]
        return _ASLEEP in states and _OPEN not in states

    def wake_at_s(self) -> float:
        """Return the earliest time.monotonic() at which the model can be awake, as far as is known."""
        return self.max_value("wake_at_s")

    def until_started_s(self) -> float:
        """Return the estimated seconds until an engine that starts can serve, from 1 to 60.

        The estimate is the duration of the last start minus the time since this start began. A start that takes longer
        than the last one, or is the first, is late. The estimate is then the time by which it is late, at most 5 s.
        """
        left_s = self.max_value("start_s") + self.max_value("start_took_s") - time.monotonic()
        return max(_MIN_START_S, min(left_s, _MAX_START_S) if left_s > 0 else min(-left_s, _MAX_LATE_S))

    def is_dead(self, replica: int) -> bool:
        """Return whether a replica has no working engine process. A replica that drains is not dead."""
        return self._closed(replica) == _DEAD

    def set_connected(self, replica: int, is_connected: bool) -> None:
        """Store whether this process has sockets to a replica. Without sockets it sends no requests to the replica."""
        (self._unconnected_replicas.discard if is_connected else self._unconnected_replicas.add)(replica)

    def set_answers(self, replica: int, has_answered: bool) -> None:
        """Store whether an upstream server has answered the health requests of this process."""
        (self._unanswering_replicas.discard if has_answered else self._unanswering_replicas.add)(replica)

    def fail_process_requests(self, process_index: int) -> int:
        """Count the open requests of a dead process as failed, and return their number.

        Only the supervisor calls this method.
        """
        row = self.shared.rows[process_index]
        with self.shared.locked():
            num_failed = round(row[self._column["in_flight"]])
            row[self._column["failed"]] += num_failed
            queue_columns = [f"queue_{name}/{each}" for each in CLASSES for name in ("requests", "units")]
            for name in ("in_flight", "waiting_prompt_tokens", "queue_requests", *queue_columns):
                row[self._column[name]] = 0
            for replica in range(self.replicas):
                row[self._request_columns[replica]] = row[self._token_columns[replica]] = 0
        return num_failed

    def _closed(self, replica: int) -> float:
        return self.shared.rows[0][self._state_columns[replica]]

    def _close(self, replica: int, value: float) -> None:
        with self.shared.locked():  # an API server that has just chosen the replica counts its request first
            self.shared.rows[0][self._state_columns[replica]] = value

    def finish(
        self,
        finish_reason: str,
        *,
        prompt_tokens: int,
        arrived_s: float,
        first_token_s: float | None,
        now_s: float,
        times: RequestTimes | None,
    ) -> None:
        """Count one finished request. `times` are the engine's times, or None if the engine did not end the request."""
        self.add(f"success_{finish_reason}")
        self.add("prompt_tokens", prompt_tokens)
        self.histograms["e2e_request_latency_seconds"].observe(now_s - arrived_s)
        if first_token_s is not None:
            self.histograms["request_decode_time_seconds"].observe(now_s - first_token_s)
        if times is not None:
            self.histograms["request_queue_time_seconds"].observe(times.scheduled_s - times.arrived_s)
            self.histograms["request_prefill_time_seconds"].observe(times.first_token_s - times.scheduled_s)


def _model_columns(replicas: int) -> Iterator[str]:
    yield from _MODEL_COLUMNS
    yield from (
        f"replica_{name}/{replica}" for replica in range(replicas) for name in (*_REPLICA_COLUMNS, *_ENGINE_COLUMNS)
    )
    for histogram, bounds in [
        *((name, bounds) for name, _, bounds in HISTOGRAMS),
        *((f"{QUEUE_WAIT[0]}/{each}", QUEUE_WAIT[2]) for each in CLASSES),
    ]:
        yield from _histogram_columns(histogram, bounds)


def _histogram_columns(name: str, bounds: Sequence[float]) -> Iterator[str]:
    yield from (f"{name}/{bound}" for bound in range(len(bounds) + 1))
    yield f"{name}/sum"
