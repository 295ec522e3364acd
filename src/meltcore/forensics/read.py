"""A trace from a file, whichever profiler wrote it."""

from __future__ import annotations

from pathlib import Path

from meltcore.errors import ConfigError
from meltcore.forensics.chrome import read_chrome
from meltcore.forensics.nsight import MAGIC, read_nsight
from meltcore.forensics.trace import Trace


def read_trace(path: Path | str) -> Trace:
    """An export of Nsight Systems, known by its first bytes, or the torch profiler's.

    Raises ConfigError for a file that is neither, or holds nothing a GPU did.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            exported = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    trace = read_nsight(path) if exported else read_chrome(path)
    if not trace.activities:
        raise ConfigError(f"{path} holds nothing that a GPU did: was it recorded on one, with CUDA activities?")
    return trace
