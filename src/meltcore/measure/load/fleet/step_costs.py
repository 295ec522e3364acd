"""Measures what the steps of a model cost, from the server's metrics while the model has the GPU to itself."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from meltcore.common.files import read_document
from meltcore.measure.documents.schema import VersionedDocument
from meltcore.measure.documents.step_costs import UNLIMITED, GpuStepCosts, StepCosts
from meltcore.measure.load.fleet.simulation import Job
from meltcore.measure.load.wire.connection import HttpRequestError, Target, get
from meltcore.measure.load.wire.probe import PROBE_TIMEOUT_S

SAMPLE_S = 0.5
# Fewer steps of a bucket tell little of their cost, unless the bucket is the only one.
MIN_STEPS = 5
_LINE = re.compile(
    r"^meltcore:engine_(steps|step_seconds|step_rows|step_prompt_tokens)_total"
    r'\{model_name="((?:[^"\\]|\\.)*)"\} (\S+)$',
    re.MULTILINE,
)


class StepCostsFile(VersionedDocument, kw_only=True, tag_field="document", tag="step-costs"):
    """The step costs that runs have measured, by the type of their GPU as the server names it."""

    gpus: dict[str, GpuStepCosts] = msgspec.field(default_factory=dict)


class StepSums(NamedTuple):
    """The steps of a model's engines: their number, their seconds, and the rows and prompt tokens in all of them."""

    steps: float
    seconds: float
    rows: float
    prompt_tokens: float


@dataclass
class AloneSteps:
    """The steps of a model while it was alone, by windows of time, and what its clients sent meanwhile."""

    windows: list[StepSums] = field(default_factory=list)
    rows: int = 0
    units: float = 0.0
    has_output_tokens: bool = True

    def add(self, windows: Sequence[StepSums], jobs: Sequence[Job]) -> None:
        """Add the windows of one level and the requests that its clients have sent."""
        self.windows += windows
        self.rows += sum(job.rows for job in jobs)
        self.units += sum(job.units for job in jobs)
        self.has_output_tokens = self.has_output_tokens and all(job.steps for job in jobs)


def parse_step_sums(text: str) -> dict[str, StepSums]:
    """Return the sums of a Prometheus page by model. Models without all four metrics are left out."""
    found: dict[str, dict[str, float]] = {}
    for name, model, value in _LINE.findall(text):
        found.setdefault(re.sub(r"\\(.)", r"\1", model), {})[name] = float(value)
    names = ("steps", "step_seconds", "step_rows", "step_prompt_tokens")
    return {model: StepSums(*(sums[name] for name in names)) for model, sums in found.items() if len(sums) == 4}


def windows_of(samples: Sequence[Mapping[str, StepSums]], model: str) -> list[StepSums]:
    """Return the differences of consecutive samples in which a model has run steps."""
    sums = [sample[model] for sample in samples if model in sample]
    windows = [StepSums(*np.subtract(later, earlier).tolist()) for earlier, later in itertools.pairwise(sums)]
    return [window for window in windows if window.steps > 0 and window.seconds > 0]


class StepSampler:
    """Reads the step metrics of a server at intervals."""

    def __init__(self, target: Target) -> None:
        """Sample `target`. A server without these metrics gives empty samples."""
        self._target = target
        self._samples: list[dict[str, StepSums]] = []
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take the first sample, and others until `finish`."""
        self._samples = [await self._read()]
        self._task = asyncio.create_task(self._sample())

    async def finish(self) -> list[dict[str, StepSums]]:
        """Take the last sample, and return all."""
        assert self._task is not None
        self._task.cancel()
        return [*self._samples, await self._read()]

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._samples.append(await self._read())

    async def _read(self) -> dict[str, StepSums]:
        try:
            status, body = await get(self._target, "/metrics", PROBE_TIMEOUT_S)
        except HttpRequestError:
            return {}  # the requests themselves show whether the server is alive
        return parse_step_sums(body.decode("utf-8", "replace")) if status == 200 else {}


def fit_step_costs(alone: AloneSteps) -> StepCosts | None:
    """Return the costs that explain the windows best, or None without a window.

    A step costs a constant, a time per row and a time per unit, none of them negative, fitted by least squares. The
    constant and the rows are then replaced by the mean of each power of two of rows.
    """
    windows = np.array(alone.windows, dtype=np.float64).reshape(-1, 4)
    if not len(windows):
        return None
    _, row_s, token_s = _non_negative(windows[:, [0, 2, 3]], windows[:, 1])
    buckets: dict[int, list[np.ndarray]] = {}
    for window in windows:
        buckets.setdefault(int(np.log2(max(1.0, window[2] / window[0]))), []).append(window)
    sums = [np.sum(bucket, axis=0) for _, bucket in sorted(buckets.items())]
    kept = [each for each in sums if each[0] >= MIN_STEPS] or sums
    total_tokens = windows[:, 3].sum()
    has_units = bool(alone.units and total_tokens)
    tokens_per_unit = total_tokens / alone.units if has_units else 1.0
    most_tokens = (windows[:, 3] / windows[:, 0]).max()
    return StepCosts(
        decode_s=[
            (float(rows / steps), float(max(seconds - token_s * tokens, 0.0) / steps))
            for steps, seconds, rows, tokens in kept
        ],
        row_s=float(row_s),
        unit_s=float(token_s * tokens_per_unit),
        max_units=float(most_tokens / tokens_per_unit) if has_units else UNLIMITED,
        row_steps=None if alone.has_output_tokens else float(windows[:, 2].sum() / max(1, alone.rows)),
    )


def _non_negative(factors: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return the non-negative coefficients [3] of the factors [n, 3] with the least squared error.

    With three factors all sets of positive ones can be tried.
    """
    best, least = np.zeros(3), float("inf")
    for count in (1, 2, 3):
        for chosen in itertools.combinations(range(3), count):
            columns = factors[:, chosen]
            found = np.linalg.lstsq(columns, seconds, rcond=None)[0]
            error = float(np.square(columns @ found - seconds).sum())
            if (found >= 0).all() and error < least * (1 - 1e-9):
                best, least = np.zeros(3), error
                best[list(chosen)] = found
    return best


def merge_step_costs(known: StepCosts | None, measured: StepCosts) -> StepCosts:
    """Return the measured costs, with the known ones of batch sizes that were not measured now."""
    if known is None:
        return measured
    if not known.decode_s:  # its bytes and operations alone
        return msgspec.structs.replace(measured, step_bytes=known.step_bytes, unit_flops=known.unit_flops)
    sizes = {int(np.log2(max(1.0, rows))) for rows, _ in measured.decode_s}
    others = [point for point in known.decode_s if int(np.log2(max(1.0, point[0]))) not in sizes]
    return msgspec.structs.replace(
        measured,
        decode_s=sorted([*others, *measured.decode_s]),
        unit_s=measured.unit_s or known.unit_s,
        max_units=max(measured.max_units, known.max_units),
        step_bytes=known.step_bytes,
        unit_flops=known.unit_flops,
    )


def read_step_costs(path: Path) -> StepCostsFile:
    """Return the content of a file of step costs. A missing file has none. Raises ConfigError for another content."""
    return read_document(path, StepCostsFile) if path.exists() else StepCostsFile()
