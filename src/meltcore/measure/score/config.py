"""Options of `meltcore bench`. Nothing heavy is imported here: `meltcore bench --help` reads this module."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from meltcore.common.errors import ConfigError
from meltcore.common.options import option

MIN_DURATION_S = 10.0
SWEEP_FRACTION = 0.95  # of --duration; the rest is for the start
MIN_CELL_S = 1.0  # of a sweep
MAX_TEMPERATURES = 4  # as many colors as charts have


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """The settings of a run. Without `model`, random weights in the shapes of Qwen3-0.6B are used."""

    gpus: str | None = option(
        None,
        "GPUs, by index as in nvidia-smi or by UUID (default: CUDA_VISIBLE_DEVICES, or all).",
        flag="--gpu",
        metavar="ID,...",
    )
    cpu: bool = option(False, "Run on the CPU; the result is not comparable.")
    duration_s: float = option(300.0, "Total duration: 40 % ladder, 55 % sustained run, 5 % start.")
    precision: Literal["bf16", "fp8"] = option("bf16", "Precision; each is a workload of its own.")
    model: str | None = option(None, "Checkpoint folder or hub id (default: random weights).", metavar="PATH")
    reference: str | None = option(
        None,
        "Result to compare with: a file, a run folder, or the name of a shipped reference (default: all shipped ones).",
        metavar="FILE|NAME",
    )
    out: str = option("runs", "Parent of the run folder.", metavar="DIR")
    prompts: str | None = option(
        None,
        'Prompts instead of the score\'s: one per line, or .jsonl with "prompt". A workload of its own; needs --model.',
        metavar="FILE",
    )
    sweep: bool = option(
        False, "Measure a grid of loads instead of the score; a workload of its own, never ranked.", group="sweep"
    )
    sweep_concurrency: tuple[int, ...] = option(
        (1, 16, 64, 256), "Concurrent requests.", group="sweep", limits={"minimum": 1, "maximum": 10_000}
    )
    sweep_output_lens: tuple[int, ...] = option(
        (32, 128, 512), "Output tokens per request.", group="sweep", limits={"minimum": 1, "maximum": 1_024}
    )
    sweep_temperatures: tuple[float, ...] = option(
        (0.0, 0.7, 1.0), "Sampling temperatures, at most 4.", group="sweep", limits={"minimum": 0, "maximum": 2}
    )
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not MIN_DURATION_S <= self.duration_s < math.inf:
            raise ConfigError(f"--duration must be at least {MIN_DURATION_S:g} s; got {self.duration_s:g}")
        if self.precision not in ("bf16", "fp8"):
            raise ConfigError(f"--precision must be bf16 or fp8; got {self.precision}")
        if self.cpu and self.precision != "bf16":
            raise ConfigError(f"--precision {self.precision} needs a GPU; a CPU computes in float32")
        if self.cpu and self.gpus is not None:
            raise ConfigError("--cpu and --gpu exclude each other")
        if self.sweep and self.prompts is not None:
            raise ConfigError("--sweep has prompts of its own: it excludes --prompts")
        if self.sweep:
            self._check_sweep()
        else:
            for name in ("concurrency", "output_lens", "temperatures"):
                if getattr(self, f"sweep_{name}") != getattr(BenchConfig, f"sweep_{name}"):
                    raise ConfigError(f"--sweep-{name.replace('_', '-')} needs --sweep")

    @property
    def sweep_cells(self) -> int:
        """The number of cells of the sweep."""
        return len(self.sweep_concurrency) * len(self.sweep_output_lens) * len(self.sweep_temperatures)

    def _check_sweep(self) -> None:
        if self.reference is not None:
            raise ConfigError("--sweep has no score, so --reference has nothing to compare")
        for name in ("concurrency", "output_lens", "temperatures"):
            values = getattr(self, f"sweep_{name}")
            if list(values) != sorted(set(values)):
                values_text = ",".join(f"{value:g}" for value in values)
                raise ConfigError(f"--sweep-{name.replace('_', '-')} must ascend without repetition; got {values_text}")
        if len(self.sweep_temperatures) > MAX_TEMPERATURES:
            raise ConfigError(
                f"--sweep-temperatures takes at most {MAX_TEMPERATURES}; got {len(self.sweep_temperatures)}"
            )
        cell_s = SWEEP_FRACTION * self.duration_s / self.sweep_cells
        if cell_s < MIN_CELL_S:
            raise ConfigError(
                f"--duration {self.duration_s:g} gives each of {self.sweep_cells} cells {cell_s:.2g} s; the least is "
                f"{MIN_CELL_S:g} s: a longer duration or fewer cells"
            )
