"""A trace of the live engine, taken with the torch profiler."""

import time
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEP = "step"  # the name of a step's range in the trace, by which `meltcore profile` counts them


class Profiler:
    """Records from construction until `stop`, which writes a Chrome trace into `directory`."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._path = directory / f"trace-{time.strftime('%Y%m%dT%H%M%S')}.json.gz"
        self._profile = profile(activities=activities)
        self._profile.start()

    def step(self) -> AbstractContextManager[object]:
        """Marks what is done within as one step of the engine."""
        return record_function(STEP)

    def stop(self) -> Path:
        self._profile.stop()
        self._profile.export_chrome_trace(str(self._path))
        return self._path
