"""Options of `meltcore demo`. Nothing heavy is imported here: `meltcore demo --help` reads this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meltcore.errors import ConfigError
from meltcore.options import option

DEFAULT_LEVELS = (10, 100, 400, 1_000, 10_000)
NO_MODEL = "none"  # leaves a step out


def bundled_or_none(name: str) -> str:
    """Return the name of a bundled model, or NO_MODEL where this installation has no folder of it."""
    folder = Path(__file__).parent.parent / "bundled" / name.removeprefix("meltcore/")
    return name if folder.is_dir() else NO_MODEL


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """The model to serve and its load. `levels` are the concurrent requests of each level."""

    levels: tuple[int, ...] = option(DEFAULT_LEVELS, "Concurrent requests of each level.")
    model: str = option("meltcore/sums", "Model to serve, bundled by default.", metavar="MODEL")
    translator: str = option(
        "meltcore/phrases", "Model that translates after chat, bundled by default; none leaves it out.", metavar="MODEL"
    )
    synthesizer: str = option(
        bundled_or_none("meltcore/voice"),
        "Model that speaks before that, read back by the recognizer; none leaves it out.",
        metavar="MODEL",
    )
    recognizer: str = option(
        "meltcore/tones", "Model that transcribes after that, bundled by default; none leaves it out.", metavar="MODEL"
    )
    out: str = option("runs", "Parent of the run folder.", metavar="DIR")
    seed: int = option(0, "Seed of the problems that the levels ask.")
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1:
            raise ConfigError(f"levels must be numbers of at least 1; got {list(self.levels)}")
        if len(set(self.levels)) != len(self.levels):
            raise ConfigError(f"levels contains a number twice: {list(self.levels)}")
