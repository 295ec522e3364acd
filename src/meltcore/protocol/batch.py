"""Defines the messages that all tasks of a `BatchEngine` share. Each task adds its requests and results.

A task's request is a subclass of `TaskRequest`, and its result a subclass of `TaskResult`, both with a tag. All times
are `time.monotonic()` seconds, one clock for all processes of a machine.
"""

from typing import Literal

import msgspec

from meltcore.protocol.shell import EngineReady
from meltcore.protocol.step_sums import NO_STEPS

# "deadline": it had not begun when its deadline passed. A result that is not the last one has None.
TaskFinishReason = Literal["stop", "abort", "error", "deadline"]


class TaskRequest(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Asks the engine for one result. Requests run in order of `priority` (lower first), deadline and arrival.

    If a request has not begun by `deadline_s`, the engine ends it. Without a deadline it may wait for any time.
    """

    request_id: str
    priority: int = 0
    arrived_s: float = 0.0
    deadline_s: float | None = None


class TaskTimes(msgspec.Struct, array_like=True, frozen=True):
    """Holds the times at which the engine received, began and finished a request."""

    arrived_s: float
    started_s: float
    finished_s: float


class TaskResult(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """Holds the result of one request, or a part of the result.

    The last part has a `finish_reason`. If this is "error", `error` has the text.
    """

    request_id: str
    finish_reason: TaskFinishReason | None = None
    error: str | None = None
    times: TaskTimes | None = None

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of the result for the statistics, or 0 for a task without tokens."""
        return 0


class BatchStats(msgspec.Struct, array_like=True, frozen=True):
    """Holds gauges and counters of a batch engine after a step. The names of counters end in `_total`.

    Costs are in positions of the task, such as encoder frames. Padded costs include the padding of batches. The prompt
    tokens of `step_sums` (`protocol/step_sums.py`) are padded costs.
    """

    running: int = 0
    waiting: int = 0
    waiting_cost: int = 0
    cost_total: int = 0
    padded_cost_total: int = 0
    expired_total: int = 0
    step_sums: bytes = NO_STEPS


class BatchReady(EngineReady, array_like=True, frozen=True):
    """Reports that a batch engine can serve. Each task has a subclass with a tag and with its limits.

    `max_cost` limits the padded cost of the requests that run together, and so of each request.
    """

    max_cost: int

    @property
    def output_lengths(self) -> Literal["model", "synthetic"]:
        """Return "synthetic" if random weights end no output, so that the engine sets the lengths, else "model"."""
        return "synthetic" if self.has_synthetic_lengths else "model"
