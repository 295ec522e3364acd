"""The load generator: `run_levels(LoadConfig(url=...))` loads any OpenAI-compatible server and returns its results."""

from meltcore.load.config import Level, LoadConfig, Timeouts
from meltcore.load.runner import Progress, run_levels, run_levels_async

__all__ = ["Level", "LoadConfig", "Progress", "Timeouts", "run_levels", "run_levels_async"]
