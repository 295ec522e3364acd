"""Options of `meltcore demo`. Nothing heavy is imported here: `meltcore demo --help` reads this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.options import option

DEFAULT_LEVELS = (10, 100, 400, 1_000, 10_000)
GENERATION = "generation"
# Of the connections of a level. On a CPU, speech costs about 400 times as much as a short answer.
MIX = {GENERATION: 80.0, "translation": 12.0, "transcription": 7.7, "synthesis": 0.3}
TASKS = (GENERATION, "translation", "synthesis", "transcription")


def parse_tasks(text: str) -> tuple[str, ...]:
    """Parse names of tasks with commas between. Raises ConfigError for an unknown one."""
    tasks = tuple(dict.fromkeys(filter(None, text.split(","))))
    unknown = [task for task in tasks if task not in TASKS]
    if unknown:
        raise ConfigError(f"--tasks: {unknown[0]!r} is not one of {', '.join(TASKS)}")
    return tasks


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The models to serve and their load. `levels` are the connections of each level."""

    levels: tuple[int, ...] = option(DEFAULT_LEVELS, "Connections of each level.")
    tasks: tuple[str, ...] = option(
        TASKS,
        f"Tasks whose bundled models are served, with {GENERATION} (default: all: {', '.join(TASKS)}).",
        type=parse_tasks,
        action="store",
        metavar="TASK,...",
    )
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
        if GENERATION not in self.tasks:
            raise ConfigError(f"tasks must hold {GENERATION}; got {', '.join(self.tasks)}")
