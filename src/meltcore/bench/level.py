"""One closed-loop level against one engine: release, replace what ends, leave the ramp out, abort what is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from meltcore.bench import workload
from meltcore.bench.engine_process import EngineError, EngineProcess, Stopped
from meltcore.bench.lines import Abort, Generate, Step
from meltcore.bench.tally import Tally, Window

# Half of a level's time at most goes to its ramp.
_RAMP_SHARE = 0.5
# However late a level began, it gets this much of a window.
_SHORTEST_S = 0.1

Prompt = Callable[[int], list[int]]


@dataclass(kw_only=True)
class Level:
    """One level while it runs. `first` numbers its first prompt; `at_once`: as many as the engine runs in one step.

    `stop` is asked at least twice a second; where it answers True the level ends with Stopped.
    """

    process: EngineProcess
    concurrency: int
    at_once: int
    prompt: Prompt
    first: int
    stop: Callable[[], bool]
    lags_s: list[float]  # from the time of a step to our reading it
    tally: Tally = field(default_factory=lambda: Tally(workload.OUTPUT_TOKENS))
    ramp_cut: bool = False
    released_s: float = 0.0

    def run(self, end_s: float) -> Window:
        """Release, and hold the level until the first step at or after `end_s`. Raises EngineError, Stopped."""
        self.released_s = self._send(self.concurrency)
        ramp_limit_s = self.released_s + _RAMP_SHARE * (end_s - self.released_s)
        ramp_requests = min(self.concurrency, self.at_once)
        ramped_s: float | None = None
        ended_s: float | None = None
        while ended_s is None:
            for step in self._steps(end_s):
                if ramped_s is None and (self.tally.finished >= ramp_requests or step.t_s >= ramp_limit_s):
                    ramped_s = step.t_s
                    self.ramp_cut = self.tally.finished < ramp_requests
                elif ramped_s is not None and ended_s is None and step.t_s >= max(end_s, ramped_s + _SHORTEST_S):
                    ended_s = step.t_s
        self._abort()
        assert ramped_s is not None
        return self.tally.window(ramped_s, ended_s)

    def run_out(self) -> None:
        """Release, replace nothing, and wait until every request has ended: a warm-up."""
        self._send(self.concurrency)
        while self.tally.finished < self.concurrency:
            self._check_stop()
            for step in self.process.steps(time.monotonic() + 1.0):
                self.tally.take(step)
        self.process.rest()

    def _steps(self, end_s: float) -> list[Step]:
        """What came, counted, with a new request sent for each that ended."""
        self._check_stop()
        steps = self.process.steps(max(end_s, time.monotonic() + 1.0))
        now_s = time.monotonic()
        ended = 0
        for step in steps:
            ended += self.tally.take(step)
            self.lags_s.append(now_s - step.t_s)
        if ended:
            self._send(ended)
        return steps

    def _send(self, count: int) -> float:
        """Queue new requests, and say when: nothing goes out before the next wait for steps.

        One at a time, since the tokens of 10,000 prompts are 200 MB of Python integers and 35 MB as lines.
        """
        lengths = []
        for number in range(self.tally.sent, self.tally.sent + count):
            prompt = self.prompt(self.first + number)
            lengths.append(len(prompt))
            self.process.send(Generate(number, prompt, workload.OUTPUT_TOKENS))
        now_s = time.monotonic()
        for length in lengths:
            self.tally.send(length, now_s)
        return now_s

    def _abort(self) -> None:
        """End what is open and wait for the engine to say so: the next level begins with an idle engine."""
        left = set(self.tally.open())
        self.process.send(Abort(sorted(left)))
        while left:
            self._check_stop()
            for step in self.process.steps(time.monotonic() + 1.0):
                for number, _ in step.ended:
                    if number not in left:
                        raise EngineError(f"the engine ended request {number}, which was not running")
                    left.remove(number)
        self.process.rest()

    def _check_stop(self) -> None:
        if self.stop():
            raise Stopped
