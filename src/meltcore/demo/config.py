"""Options of `meltcore demo`. Nothing heavy is imported here: `meltcore demo --help` reads this module."""

from __future__ import annotations

from dataclasses import dataclass

from meltcore.errors import ConfigError
from meltcore.options import option

DEFAULT_LEVELS = (10, 100, 400, 1_000, 10_000)


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The model to serve and its load. `levels` are the concurrent requests of each level."""

    levels: tuple[int, ...] = option(DEFAULT_LEVELS, "Concurrent requests of each level.")
    model: str = option("meltcore/sums", "Model to serve, bundled by default.", metavar="MODEL")
    out: str = option("runs", "Parent of the run folder.", metavar="DIR")
    seed: int = option(0, "Seed of the problems that the levels ask.")
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1:
            raise ConfigError(f"levels must be numbers of at least 1; got {list(self.levels)}")
        if len(set(self.levels)) != len(self.levels):
            raise ConfigError(f"levels contains a number twice: {list(self.levels)}")
