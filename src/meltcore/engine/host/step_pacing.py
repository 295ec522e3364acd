"""Lets engines of higher classes on the same GPU run first, between the steps of an engine.

Kernels of two processes take turns on a GPU, about 2 ms each, however urgent they are. So each engine marks its GPU
before a step. An engine of a lower class waits before its next step while there is such a mark.

The lower class has a guaranteed share. Waiting is paid from a credit that its own steps earn: after t seconds of a step
it may wait for t (1 - share) / share. So at least `min_share` of any time with work belongs to its steps, apart from
one wait of `max_wait_ms`, which bounds the credit. A mark lapses after HOLD_S. So an engine that died or was stopped
delays other engines by at most this time.

An engine can wait between steps, and between the layers of a step whose layers are launched one by one. So other steps
are also shorter while a higher class is at work, and for SHORT_STEPS_S after it. Before that, steps are whole: the
first mark after a rest waits for the end of one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from meltcore.protocol.step_marks import StepMarks
from meltcore.protocol.step_sums import NO_STEPS, kind_of_step
from meltcore.settings.config import EngineSharing

# A mark is renewed at each step, so it has to outlast one.
HOLD_S = 1.0
# A look at the marks costs CPU, which engines on the CPU share too: the longer a wait, the rarer they are.
POLL_S, MAX_POLL_S, POLL_FRACTION = 0.0002, 0.002, 0.1
# Steps stay short for this long after the last mark: the next request should not meet a long one.
SHORT_STEPS_S = 2.0


class StepTurn(NamedTuple):
    """The seconds that the engine waited before a step, and the time limit of the step in seconds.

    A `limit_s` of None sets no limit. Else a step may be longer if it calls `wait` at least twice in that time. This
    waits for higher classes and returns the seconds that it took.
    """

    waited_s: float
    limit_s: float | None
    wait: Callable[[], float] | None = None


NO_WAIT = StepTurn(0.0, None)


class StepCounts:
    """Sums the steps of an engine by their kinds.

    While an engine has work, a step begins when the one before it ends. So the times of steps have no gaps, and the
    host's work between two steps is part of them. The wait for engines of higher classes is not.
    """

    def __init__(self) -> None:
        """Start at 0."""
        self._waited_s = 0.0  # before steps, since the last step ended
        self._has_waited_in_flight = False
        self._last_end_s: float | None = None  # None if the engine had no more work then
        self._sums = array("d", NO_STEPS)

    def begin(self, waited_s: float, *, is_in_flight: bool = False) -> None:
        """Note how long the engine has waited before a step, and whether the step before it was in flight meanwhile."""
        if self._last_end_s is not None or is_in_flight:
            self._waited_s += waited_s
        self._has_waited_in_flight |= is_in_flight and waited_s > 0

    def end(
        self,
        launched_s: float,
        ended_s: float,
        rows: int,
        prompt_tokens: int,
        turn: StepTurn,
        *,
        goes_on: bool,
        yielded_s: float = 0.0,
    ) -> float | None:
        """Count a step with at least one row, which was launched and has ended at these times.

        `turn` is the turn of this step, and `yielded_s` the time for which it waited between its layers. `goes_on` says
        whether the engine has more work now. Return the time of the step. Return None if the engine has waited while
        the step was in flight, since it may have ended during the wait.
        """
        began_s = launched_s if self._last_end_s is None else self._last_end_s
        took_s = max(0.0, ended_s - began_s - self._waited_s - yielded_s)
        is_known, self._waited_s, self._has_waited_in_flight = not self._has_waited_in_flight, 0.0, False
        kind = kind_of_step(rows, prompt_tokens, is_paced=turn.limit_s is not None)
        for at, value in enumerate((1.0, took_s, rows, prompt_tokens), 4 * kind):
            self._sums[at] += value
        self._last_end_s = ended_s if goes_on else None
        return took_s if is_known else None

    def packed(self) -> bytes:
        """Return the sums for the statistics of an engine."""
        return self._sums.tobytes()


class StepPacing:
    """Marks the steps of an engine on its GPUs, and waits for steps of higher classes."""

    def __init__(
        self,
        config: EngineSharing,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Map the marks of all GPUs of the engine. `clock` returns the machine's monotonic seconds.

        Raises ConfigError.
        """
        self._boards: Sequence[StepMarks] = [StepMarks(Path(path), config.priority_class) for path in config.marks]
        self._earned = (1 - config.min_share) / config.min_share  # seconds of waiting per second of steps
        self._max_wait_s = config.max_wait_ms / 1000
        self._step_s = config.step_ms / 1000
        self._clock = clock
        self._sleep = sleep
        self._credit_s = self._max_wait_s if self._earned else 0.0
        self._began_s = 0.0  # of the step, or of its part since the last look at the marks
        self._short_until_s = 0.0
        self.waited_s = 0.0  # in total

    def begin_step(self) -> StepTurn:
        """Mark the next step, and wait for steps of higher classes."""
        began_s = now_s = self._clock()
        for board in self._boards:
            board.mark(now_s + HOLD_S)
        for board in self._boards:
            if board.wait_until_s() > now_s:
                now_s = self._wait(now_s)
                break
        self._began_s = now_s
        if now_s >= self._short_until_s:
            return NO_WAIT
        return StepTurn(now_s - began_s, self._step_s, self._wait_in_step)

    def end_step(self, *, has_work: bool) -> None:
        """End a step. If the engine has no more work, its mark is removed."""
        if self._credit_s < self._max_wait_s:
            self._earn(self._clock())
        if not has_work:
            for board in self._boards:
                board.clear()

    def _wait_in_step(self) -> float:
        """Wait for steps of higher classes within a step of this engine. Return the seconds that it took."""
        looked_s = self._clock()
        self._earn(looked_s)
        if not any(board.wait_until_s() > looked_s for board in self._boards):
            return 0.0
        self._began_s = self._wait(looked_s)
        return self._began_s - looked_s

    def _earn(self, now_s: float) -> None:
        """Earn credit by the part of a step since the last look at the marks."""
        self._credit_s = min(self._max_wait_s, self._credit_s + (now_s - self._began_s) * self._earned)
        self._began_s = now_s

    def _wait(self, began_s: float) -> float:
        """Wait while a higher class marks a GPU and there is credit. Return the seconds that were waited."""
        now_s = began_s
        while max(board.wait_until_s() for board in self._boards) > now_s:
            left_s = self._credit_s - (now_s - began_s)
            if left_s <= 0:
                break
            poll_s = min(max(POLL_S, POLL_FRACTION * (now_s - began_s)), MAX_POLL_S)
            self._sleep(min(poll_s, left_s))
            now_s = self._clock()
            for board in self._boards:
                board.mark(now_s + HOLD_S)
        self._credit_s -= now_s - began_s  # may fall below 0 by what a sleep took longer: the next steps earn it back
        self.waited_s += now_s - began_s
        self._short_until_s = now_s + SHORT_STEPS_S
        return now_s
