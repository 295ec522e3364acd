"""Manages the logs of a fleet: one file per engine in a folder per port, and one file for the server.

The contents of a file that exceeds a limit are moved to *.previous.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, NamedTuple

from meltcore.common.errors import ConfigError

SERVER = "server"  # the prefix of the server's own lines
PREVIOUS = ".previous"  # the end of the name of the file before
LOG_LIMIT_BYTES = 64 * 2**20  # unless the file says otherwise
ROTATE_CHECK_S = 5.0
_POLL_S = 0.2
_BLOCK_BYTES = 1 << 16


class LogFile(NamedTuple):
    """A log file and the prefix of its lines: NAME of the model, or NAME@REPLICA if the model has several."""

    name: str
    path: Path


def log_path(folder: Path, name: str, replica: int, replicas: int) -> Path:
    """Return the log file of a replica. No other replica has it, because names in a file have no "%" and no "@"."""
    number = f"@{replica}" if replicas > 1 else ""
    return folder / f"{name.replace('/', '%')}{number}.log"


def log_folder(state: Path, port: int) -> Path:
    """Return the folder for the logs of the engines of the fleet on a port."""
    return state / f"fleet-{port}"


def new_log_folder(parent: Path, port: int) -> Path:
    """Return the folder for the logs of a fleet on `port`, emptied. Raises ConfigError if the folder cannot be used."""
    folder = log_folder(parent, port)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob("*.log"):
            path.unlink()
    except OSError as error:
        raise ConfigError(f"the folder of logs, {folder}, cannot be used: {error.strerror}") from error
    return folder


def find_logs(
    folder: Path, server_log: str, model: str | None, aliases: Mapping[str, Collection[str]] = MappingProxyType({})
) -> list[LogFile]:
    """Return the logs of a model, or of all models and the server. Raises ConfigError if there is no log.

    `aliases` has the aliases of each model of a fleet that runs and answers. The log of a model that was removed from
    the fleet is then found only by its name.
    """
    engines = [LogFile(path.stem.replace("%", "/"), path) for path in sorted(folder.glob("*.log"))]
    if model is None:
        own = [LogFile(SERVER, Path(server_log))] if server_log else []
        found = own + [log for log in engines if not aliases or log.name.partition("@")[0] in aliases]
    else:
        model = next((name for name, others in aliases.items() if model in others), model)
        found = [log for log in engines if log.name.partition("@")[0] == model]
    if not found:
        known = f"it has {', '.join(log.name for log in engines)}" if engines else "no engine has started"
        raise ConfigError(f"no log of {model or 'any model'} in {folder}; {known}")
    return found


def print_logs(logs: Sequence[LogFile], num_lines: int | None, *, follow: bool, out: Callable[[str], None]) -> None:
    """Pass each line of the logs to `out`. With `follow`, continue with new lines until interrupted.

    Lines get a prefix if there are several files. `num_lines` is the number of lines at the end of each file with which
    the output begins. None passes all lines.
    """
    width = max(len(log.name) for log in logs)
    prefixes = [f"{log.name:<{width}} | " if len(logs) > 1 else "" for log in logs]
    files = [_Tail(log.path) for log in logs]
    for file, prefix in zip(files, prefixes, strict=True):
        lines = list(file.lines())
        if file.rest and not follow:
            lines.append(file.rest.decode(errors="replace"))
        for line in lines if num_lines is None else lines[max(0, len(lines) - num_lines) :]:
            out(prefix + line)
    while follow:
        for file, prefix in zip(files, prefixes, strict=True):
            for line in file.lines():
                out(prefix + line)
        time.sleep(_POLL_S)


async def keep_small(files: Callable[[], Sequence[Path]], limit_bytes: int) -> None:
    """Check the sizes of log files regularly, and rotate each file with more than `limit_bytes`."""
    while True:
        await asyncio.sleep(ROTATE_CHECK_S)
        await asyncio.to_thread(rotate_large, files(), limit_bytes)


def rotate_large(files: Sequence[Path], limit_bytes: int) -> None:
    """Copy each file with more than `limit_bytes` to *.previous, and empty it.

    The file is not replaced, because a process has it open and appends to it. A line that is written between copying
    and emptying is lost. A file that cannot be copied, for example on a full disk, is emptied too.
    """
    for path in files:
        try:
            if path.stat().st_size <= limit_bytes:
                continue
            try:
                shutil.copyfile(path, path.with_name(path.name + PREVIOUS))
            finally:
                os.truncate(path, 0)
        except OSError:  # it is gone, or the disk is full; the next look comes soon
            continue


class _Tail:
    """Reads the complete lines that were added to a file since the previous read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self.rest = b""  # of a line that has no end yet

    def lines(self) -> Iterator[str]:
        """Yield new lines without their line ends."""
        try:
            status = self._path.stat()
            if self._file is None or status.st_ino != os.fstat(self._file.fileno()).st_ino:  # another fleet has begun
                self._file, self.rest = self._path.open("rb"), b""
        except OSError:  # not written yet
            return
        if status.st_size < self._file.tell():  # it has begun anew
            self._file.seek(0)
            self.rest = b""
        while block := self._file.read(_BLOCK_BYTES):
            *whole, self.rest = (self.rest + block).split(b"\n")
            for line in whole:
                yield line.decode(errors="replace")
