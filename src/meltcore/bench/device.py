"""One device's way through the score: start its engine, warm it up, climb the ladder, hold the best level."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from meltcore.bench import workload
from meltcore.bench.engine_process import OWN_PROGRAM, STALL_LIMIT_S, EngineError, EngineProcess, Stopped
from meltcore.bench.level import Level
from meltcore.bench.lines import Ready
from meltcore.bench.numbers import best_level, score_level
from meltcore.bench.plan import LEVEL_SHARES, SUSTAINED_SHARE
from meltcore.results.score import ScoreLevel

# Prompts of a level are numbered from a million times its place on, so that no two levels share one.
_LEVEL_PROMPTS = 1_000_000
_WARM_UP_REQUESTS = 16


@dataclass(frozen=True, kw_only=True)
class Device:
    """What to run on. `position`: among the monitor's GPUs, None for a CPU. `settings` are EngineConfig's fields.

    `memory_in_use_bytes`: by whatever ran before the engine, None where NVML does not say.
    """

    name: str
    label: str
    settings: Mapping[str, Any]
    position: int | None = None
    uuid: str | None = None
    memory_bytes: int | None = None
    memory_in_use_bytes: int | None = None

    @property
    def environment(self) -> dict[str, str]:
        """CUDA takes the UUIDs of GPUs and of MIG slices alike, and the engine then sees that one alone."""
        return {} if self.uuid is None else {"CUDA_VISIBLE_DEVICES": self.uuid}


@dataclass(kw_only=True)
class DeviceRun:
    """A context manager around the device's engine. What is known so far stays in the fields, however it ends."""

    device: Device
    levels_wanted: Sequence[int]
    duration_s: float
    log_path: Path
    stop: Callable[[], bool]
    on_level: Callable[[Device, ScoreLevel, bool], None]
    program: Sequence[str] = OWN_PROGRAM
    stall_limit_s: float = STALL_LIMIT_S
    ready: Ready | None = None
    levels: list[ScoreLevel] = field(default_factory=list)
    sustained: ScoreLevel | None = None
    failure: str | None = None
    load_s: float | None = None
    lag_p99_ms: float | None = None
    step_s: list[np.ndarray] = field(default_factory=list)
    step_tokens: list[np.ndarray] = field(default_factory=list)
    _process: EngineProcess | None = None

    def __enter__(self) -> DeviceRun:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process is not None:
            self._process.stop()

    def start(self) -> None:
        """Until the engine has answered a few requests, so that nothing is compiled later. Errors go to `failure`."""
        started_s = time.monotonic()
        try:
            self._process = EngineProcess(
                self.device.settings,
                self.log_path,
                environment=self.device.environment,
                program=self.program,
                stall_limit_s=self.stall_limit_s,
            )
            self.ready = self._process.wait_ready(self.stop)
            self._level(_WARM_UP_REQUESTS, place=-1, lags_s=[]).run_out()
        except EngineError as error:
            self.failure = str(error)
        except Stopped:
            self.failure = "interrupted"
        self.load_s = time.monotonic() - started_s

    def climb(self, began_s: float) -> None:
        """The ladder from `began_s` on, each level to its share of the time, then the sustained run."""
        end_s = began_s
        try:
            for place, concurrency in enumerate(self.levels_wanted):
                end_s += LEVEL_SHARES[concurrency] * self.duration_s
                self.levels.append(self._measure(concurrency, place, began_s, end_s, last=False))
            best = best_level(self.levels)
            end_s += SUSTAINED_SHARE * self.duration_s
            self.sustained = self._measure(best, len(self.levels_wanted), began_s, end_s, last=True)
        except EngineError as error:
            self.failure = str(error)
        except Stopped:
            self.failure = "interrupted"

    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """(times, tokens) of every step of the ladder and the sustained run."""
        if not self.step_s:
            return np.zeros(0), np.zeros(0)
        return np.concatenate(self.step_s), np.concatenate(self.step_tokens)

    def _measure(self, concurrency: int, place: int, began_s: float, end_s: float, *, last: bool) -> ScoreLevel:
        lags_s: list[float] = []
        level = self._level(concurrency, place, lags_s)
        try:
            window = level.run(end_s)
        finally:
            times, tokens = level.tally.steps()
            self.step_s.append(times)
            self.step_tokens.append(tokens)
        if last:
            self.lag_p99_ms = float(np.quantile(lags_s, 0.99) * 1000)
        found = score_level(concurrency, window, began_s=began_s, released_s=level.released_s, ramp_cut=level.ramp_cut)
        self.on_level(self.device, found, last)
        return found

    def _level(self, concurrency: int, place: int, lags_s: list[float]) -> Level:
        assert self._process is not None
        assert self.ready is not None
        vocab_size = self.ready.vocab_size
        return Level(
            process=self._process,
            concurrency=concurrency,
            at_once=self.ready.max_num_seqs,
            prompt=lambda number: workload.prompt(number, vocab_size),
            first=(place + 1) * _LEVEL_PROMPTS,
            stop=self.stop,
            lags_s=lags_s,
        )
