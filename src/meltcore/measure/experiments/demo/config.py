"""Options of `meltcore demo`. Nothing heavy is imported here: `meltcore demo --help` reads this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from meltcore.common.errors import ConfigError
from meltcore.common.options import option
from meltcore.measure.load.tasks.task import default_task, tasks

CHAT = default_task().name
MIX = {name: task.demo_share for name, task in tasks().items() if task.demo_share}
TASKS = tuple(MIX)


def parse_tasks(text: str) -> tuple[str, ...]:
    """Parse comma-separated names of tasks. Raises ConfigError for an unknown name."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise ConfigError(f"--tasks: {unknown[0]!r} is not one of {', '.join(TASKS)}")
    return names


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The models to serve and their load. `levels` holds the number of connections of each level."""

    levels: tuple[int, ...] = option((10, 100, 400, 1_000, 10_000), "Connections of each level.")
    tasks: tuple[str, ...] = option(
        TASKS,
        f"Tasks whose bundled models are served, with {CHAT} (default: all: {', '.join(TASKS)}).",
        type=parse_tasks,
        action="store",
        metavar="TASK,...",
    )
    device: Literal["cpu", "cuda"] = option("cpu", "Device of all models; cuda is the first visible GPU.")
    chat_model: str | None = option(
        None,
        "Language model with real weights, a GGUF file or a folder, which is asked a few questions too.",
        metavar="PATH",
    )
    level_s: float = option(
        3.0,
        "Time for which the connections of a level send, at least one request each.",
        flag="--level-duration",
        limits={"exclusive_minimum": 0},
    )
    clients: bool = option(True, "Do not open the routes with the packages openai and dwani.")
    out: str = option("runs", "Parent of the run folder.", metavar="DIR")
    seed: int = option(0, "Seed of the problems that the levels ask.")
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1:
            raise ConfigError(f"levels must be numbers of at least 1; got {list(self.levels)}")
        if len(set(self.levels)) != len(self.levels):
            raise ConfigError(f"levels contains a number twice: {list(self.levels)}")
        if self.chat_model is not None and not Path(self.chat_model).exists():
            raise ConfigError(f"--chat-model: {self.chat_model} does not exist")
        if CHAT not in self.tasks:
            raise ConfigError(f"tasks must hold {CHAT}; got {', '.join(self.tasks)}")
