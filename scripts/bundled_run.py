"""What the scripts that make bundled models share: training by the clock, and the records of a run."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch

EVALUATION_BYTES = 4 * 2**30  # of a device that other trainings may share
_WARM_UP = 0.02
_REPORT_EVERY_S = 30.0


@dataclass
class Tensors:
    """A dataclass of tensors, and of other such dataclasses, that moves as a whole."""

    def pin_memory(self) -> Self:
        return self._mapped(torch.Tensor.pin_memory)

    def to(self, device: torch.device) -> Self:
        return self._mapped(lambda tensor: tensor.to(device, non_blocking=True))

    def _mapped(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        values = vars(self).values()
        return type(self)(*(v._mapped(change) if isinstance(v, Tensors) else change(v) for v in values))


class Tick(NamedTuple):
    """A training step: its number, the part of the time that is over, and whether to print now."""

    step: int
    progress: float
    report: bool


def ticks(minutes: float, optimizers: list[torch.optim.Optimizer]) -> Iterator[Tick]:
    """Yield until the time is over. The learning rate rises to its peak in the first 2 %, then falls to zero."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
    began = reported = time.monotonic()
    step = 0
    while (progress := (time.monotonic() - began) / (60 * minutes)) < 1:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * min(1.0, progress / _WARM_UP) * (1 - progress)
        step += 1
        is_due = time.monotonic() - reported > _REPORT_EVERY_S
        if is_due:
            reported = time.monotonic()
        yield Tick(step, progress, is_due)
        if is_due:
            print(f"{time.monotonic() - began:5.0f} s  step {step}", flush=True)


def update(model: torch.nn.Module, loss: torch.Tensor, optimizers: list[torch.optim.Optimizer], clip: float) -> None:
    """Take one step. clip: the largest norm of the gradients."""
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def evaluation_record(what: str, training: str, parameters: int, kinds: dict[str, Any], packages: list[str]) -> Any:
    """Return what evaluation.json holds: the results with the software and machine that measured them."""
    return {
        "what": what,
        "training": training,
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "command": shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *_without_out(sys.argv[1:])]),
        "date": today(),
        "parameters": parameters,
        "kinds": kinds,
    }


def write_records(folder: Path, evaluation: Any, card: str) -> None:
    """Write evaluation.json and README.md. card: a text with {rows} and names of fields of the evaluation."""
    (folder / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")
    rows = "\n".join(
        f"| {kind} | {found['problems']:,} | {found['right']:,} | {found['right'] / found['problems']:.2%} |"
        for kind, found in evaluation["kinds"].items()
    )
    (folder / "README.md").write_text(card.format(rows=rows, **evaluation))
    print(rows, flush=True)


def run_arguments(description: str, out: str, minutes: float, workers: int) -> argparse.ArgumentParser:
    """Return a parser of the options that all scripts have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, default=Path(out), help="checkpoint folder")
    parser.add_argument("--minutes", type=float, default=minutes, help=f"training time (default {minutes:g})")
    parser.add_argument("--workers", type=int, default=workers, help=f"processes that make data (default {workers})")
    parser.add_argument("--evaluate-only", action="store_true", help="measure the checkpoint in --out, train nothing")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def training_text(folder: Path, minutes: float, *, is_old: bool) -> str:
    """Return how long a checkpoint was trained. is_old: as its own evaluation.json says."""
    if is_old:
        return str(json.loads((folder / "evaluation.json").read_text())["training"])
    return f"{minutes:g} minutes on {machine()}, {today()}"


def machine() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def num_elements(tensors: dict[str, torch.Tensor]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def _without_out(arguments: list[str]) -> list[str]:
    """The command line without --out, however it is written."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--out")
    return parser.parse_known_args(arguments)[1]
