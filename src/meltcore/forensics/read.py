"""A trace from a file, whichever profiler wrote it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory

from meltcore.errors import ConfigError
from meltcore.forensics.chrome import read_chrome
from meltcore.forensics.nsight import MAGIC, read_nsight
from meltcore.forensics.trace import Trace

_REPORT = ".nsys-rep"
_EXPORT_LIMIT_S = 600.0  # a minute of a busy GPU is millions of rows


def read_trace(path: Path | str) -> Trace:
    """The torch profiler's, an export of Nsight Systems (known by its first bytes), or a report of it, exported first.

    Raises ConfigError for a file that is none of them, holds nothing a GPU did, or cannot be exported here.
    """
    path = Path(path)
    if path.suffix == _REPORT:
        with TemporaryDirectory() as folder:
            return _read(_exported(path, Path(folder)))
    return _read(path)


def _read(path: Path) -> Trace:
    try:
        with path.open("rb") as file:
            exported = file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise ConfigError(f"cannot read the trace {path}: {error.strerror}") from error
    trace = read_nsight(path) if exported else read_chrome(path)
    if not trace.activities:
        raise ConfigError(f"{path} holds nothing that a GPU did: was it recorded on one, with CUDA activities?")
    return trace


def _exported(report: Path, folder: Path) -> Path:
    """The report as SQLite, by `nsys` of this machine."""
    nsys = shutil.which("nsys")
    if nsys is None:
        raise ConfigError(
            f"{report} needs nsys, which is not installed here: export it where it is, with `nsys export --type sqlite`"
        )
    target = folder / "report.sqlite"
    command = [nsys, "export", "--type", "sqlite", "--output", str(target), str(report)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_EXPORT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"nsys did not export {report} within {_EXPORT_LIMIT_S:.0f} s") from error
    if done.returncode != 0 or not target.is_file():
        words = (done.stderr or done.stdout).strip().splitlines()
        raise ConfigError(f"nsys could not export {report}: {words[-1] if words else f'status {done.returncode}'}")
    return target
