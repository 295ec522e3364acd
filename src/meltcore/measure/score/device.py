"""Measures the score of one device: starts its engine, runs a ladder of levels, and sustains the best level."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from meltcore.measure.documents.score import ScoreLevel, SweepGrid
from meltcore.measure.score import workload
from meltcore.measure.score.counting import LevelWindow, StepCounter, best_level, score_level
from meltcore.measure.score.engine_process import EngineError, RunInterruptedError, ScoredEngine
from meltcore.protocol.json_lines import Abort, Generate, ReadyLine, StepLine

# Prompts of a level are numbered from a million times its index, so that no two levels share one.
_MAX_PROMPTS_PER_LEVEL = 1_000_000
_NUM_WARMUPS = 16
_MAX_RAMP = 0.5  # of a level's time
_MIN_WINDOW_S = 0.1  # also for a level that began late


@dataclass(frozen=True, kw_only=True)
class Device:
    """A device to score, with fields of EngineConfig as `settings`.

    `monitor_index` is its index in the monitor, or None for a CPU. `memory_in_use_bytes` is the memory that other
    programs use before the engine starts. It is None if NVML does not report it.
    """

    name: str
    label: str
    settings: Mapping[str, Any]
    monitor_index: int | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    memory_in_use_bytes: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that make only this device visible to CUDA, by the UUID of a GPU or MIG slice."""
        return {} if self.uuid is None else {"CUDA_VISIBLE_DEVICES": self.uuid}


@dataclass(kw_only=True)
class LevelRun:
    """One level while it runs.

    `first_prompt` is the number of the level's first prompt, and `max_num_seqs` the engine's limit per step.
    `is_interrupted` is called at least twice per second. If it returns True, the level raises RunInterruptedError.
    `lags_s` collects the delay between the end of each step and the time when we read it.
    """

    process: ScoredEngine
    concurrency: int
    max_num_seqs: int
    prompt: Callable[[int], list[int]]
    first_prompt: int
    is_interrupted: Callable[[], bool]
    output_len: int = workload.OUTPUT_TOKENS
    temperature: float = 0.0
    counter: StepCounter = field(init=False)
    lags_s: list[float] = field(default_factory=list)
    ramp_cut: bool = False
    released_s: float = 0.0

    def __post_init__(self) -> None:
        self.counter = StepCounter(self.output_len)

    def run(self, end_s: float) -> LevelWindow:
        """Send the requests, and replace ended requests until the first step at or after `end_s`.

        Return the measured window. Raises EngineError if the engine fails, and RunInterruptedError if the user
        interrupts the run.
        """
        self.released_s = self._send(self.concurrency)
        ramp_limit_s = self.released_s + _MAX_RAMP * (end_s - self.released_s)
        ramp_requests = min(self.concurrency, self.max_num_seqs)
        ramped_s: float | None = None
        ended_s: float | None = None
        while ended_s is None:
            for step in self._steps(end_s):
                if ramped_s is None and (self.counter.finished >= ramp_requests or step.t_s >= ramp_limit_s):
                    ramped_s = step.t_s
                    self.ramp_cut = self.counter.finished < ramp_requests
                elif ramped_s is not None and ended_s is None and step.t_s >= max(end_s, ramped_s + _MIN_WINDOW_S):
                    ended_s = step.t_s
        self._abort()
        assert ramped_s is not None
        return self.counter.window(ramped_s, ended_s)

    def run_once(self) -> None:
        """Send the requests and wait until all have ended, as a warm-up. Ended requests are not replaced."""
        self._send(self.concurrency)
        while self.counter.finished < self.concurrency:
            self._check_interrupted()
            for step in self.process.steps(time.monotonic() + 1.0):
                self.counter.add(step)
        self.process.set_idle()

    def _steps(self, end_s: float) -> list[StepLine]:
        """Receive and count steps, replace each ended request by a new one, and return the steps."""
        self._check_interrupted()
        steps = self.process.steps(max(end_s, time.monotonic() + 1.0))
        now_s = time.monotonic()
        num_ended = 0
        for step in steps:
            num_ended += self.counter.add(step)
            self.lags_s.append(now_s - step.t_s)
        if num_ended:
            self._send(num_ended)
        return steps

    def _send(self, num_requests: int) -> float:
        """Queue `num_requests` requests and return the time when they were queued. The next wait for steps writes them.

        Prompts are made one at a time, because the tokens of 10,000 prompts are 200 MB of Python integers.
        """
        lengths = []
        for request_id in range(self.counter.num_sent, self.counter.num_sent + num_requests):
            prompt = self.prompt(self.first_prompt + request_id)
            lengths.append(len(prompt))
            self.process.send(Generate(request_id, prompt, self.output_len, self.temperature))
        now_s = time.monotonic()
        for length in lengths:
            self.counter.send(length, now_s)
        return now_s

    def _abort(self) -> None:
        """Abort open requests and wait for the engine's confirmation: the next level begins with an idle engine."""
        open_ids = set(self.counter.open())
        self.process.send(Abort(sorted(open_ids)))
        while open_ids:
            self._check_interrupted()
            for step in self.process.steps(time.monotonic() + 1.0):
                for request_id, _ in step.finish_reasons:
                    if request_id not in open_ids:
                        raise EngineError(f"the engine ended request {request_id}, which was not running")
                    open_ids.remove(request_id)
        self.process.set_idle()

    def _check_interrupted(self) -> None:
        if self.is_interrupted():
            raise RunInterruptedError


@dataclass(kw_only=True)
class DeviceRun:
    """A context manager around a device's engine. Its fields hold all measurements so far, even if the run fails.

    With `grid`, `run` measures a sweep instead of the ladder and the sustained run.
    """

    device: Device
    concurrencies: Sequence[int]
    duration_s: float
    log_path: Path
    is_interrupted: Callable[[], bool]
    on_level: Callable[[Device, ScoreLevel, bool], None]
    prompt: Callable[[int, int], list[int]] = workload.prompt
    grid: SweepGrid | None = None
    ready_message: ReadyLine | None = None
    levels: list[ScoreLevel] = field(default_factory=list)
    sustained: ScoreLevel | None = None
    sweep: list[ScoreLevel] = field(default_factory=list)
    failure: str | None = None
    startup_s: float | None = None
    lag_p99_ms: float | None = None
    step_s: list[np.ndarray] = field(default_factory=list)
    step_tokens: list[np.ndarray] = field(default_factory=list)
    _process: ScoredEngine | None = None

    def __enter__(self) -> DeviceRun:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.stop()

    def start(self) -> None:
        """Start the engine and run a few requests, so that nothing compiles later. Errors go to `failure`."""
        started_s = time.monotonic()
        try:
            self._process = ScoredEngine(self.device.settings, self.log_path, environment=self.device.environment)
            self.ready_message = self._process.wait_ready(self.is_interrupted)
            self._level_run(_NUM_WARMUPS, index=-1).run_once()
            if self.grid is not None:  # sampling has kernels of its own
                self._level_run(_NUM_WARMUPS, index=-1, temperature=self.grid.temperatures[-1]).run_once()
        except EngineError as error:
            self.failure = str(error)
        except RunInterruptedError:
            self.failure = "interrupted"
        self.startup_s = time.monotonic() - started_s

    def run(self, began_s: float) -> None:
        """Measure from `began_s`: the sweep, or the ladder and the sustained run. Errors go to `failure`."""
        try:
            if self.grid is None:
                self._run_ladder(began_s)
            else:
                self._run_sweep(self.grid, began_s)
        except EngineError as error:
            self.failure = str(error)
        except RunInterruptedError:
            self.failure = "interrupted"

    def _run_ladder(self, began_s: float) -> None:
        """Measure each level for its fraction of the time, then the sustained run."""
        end_s = began_s
        for index, concurrency in enumerate(self.concurrencies):
            end_s += workload.LEVEL_FRACTIONS[concurrency] * self.duration_s
            run = self._level_run(concurrency, index)
            self.levels.append(self._measure(run, began_s, end_s, is_last=False))
        run = self._level_run(best_level(self.levels), len(self.concurrencies))
        end_s += workload.SUSTAINED_FRACTION * self.duration_s
        self.sustained = self._measure(run, began_s, end_s, is_last=True)

    def _run_sweep(self, grid: SweepGrid, began_s: float) -> None:
        """Measure each cell for the same time, with the temperatures of one load in succession."""
        cells = list(product(grid.concurrency, grid.output_lens, grid.temperatures))
        for index, (concurrency, output_len, temperature) in enumerate(cells):
            run = self._level_run(concurrency, index, output_len, temperature)
            end_s = began_s + (index + 1) * grid.cell_s
            level = self._measure(run, began_s, end_s, is_last=index == len(cells) - 1)
            self.sweep.append(level)

    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the times and token counts of all steps of the ladder and the sustained run."""
        if not self.step_s:
            return np.zeros(0), np.zeros(0)
        return np.concatenate(self.step_s), np.concatenate(self.step_tokens)

    def _measure(self, run: LevelRun, began_s: float, end_s: float, *, is_last: bool) -> ScoreLevel:
        try:
            window = run.run(end_s)
        finally:
            times, tokens = run.counter.steps()
            self.step_s.append(times)
            self.step_tokens.append(tokens)
        if is_last:
            self.lag_p99_ms = float(np.quantile(run.lags_s, 0.99) * 1000)
        level = score_level(run.concurrency, window, began_s=began_s, released_s=run.released_s, ramp_cut=run.ramp_cut)
        if self.grid is not None:
            level.output_len, level.temperature = run.output_len, run.temperature
        self.on_level(self.device, level, is_last)
        return level

    def _level_run(
        self, concurrency: int, index: int, output_len: int = workload.OUTPUT_TOKENS, temperature: float = 0.0
    ) -> LevelRun:
        assert self._process is not None
        assert self.ready_message is not None
        vocab_size = self.ready_message.vocab_size
        return LevelRun(
            process=self._process,
            concurrency=concurrency,
            max_num_seqs=self.ready_message.max_num_seqs,
            prompt=lambda number: self.prompt(number, vocab_size),
            first_prompt=(index + 1) * _MAX_PROMPTS_PER_LEVEL,
            is_interrupted=self.is_interrupted,
            output_len=output_len,
            temperature=temperature,
        )
