"""Starts the processes of ranks 1 and up.

This module does not import torch, so the processes start before that slow import.
"""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from meltcore.common.process import start
from meltcore.protocol.sockets import SocketFolder
from meltcore.settings.config import EngineConfig

_RANK_COMMAND = (sys.executable, "-m", "meltcore.engine.distributed")
_STDERR = 2


class StartedRanks:
    """Rank processes that have been started. They import their modules and then wait for `configure`.

    They end with `end`, or when this process ends. `folder` has the files that all ranks share, such as sockets.
    `processes` has the process of each rank.
    """

    def __init__(self, size: int) -> None:
        """Start the processes of a group of `size` ranks, except for rank 0.

        Raises ConfigError when no shared folder can be created.
        """
        shared_folder = SocketFolder("group")
        self.folder = shared_folder.path
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        # Runs when this object is collected or the interpreter ends, whichever is first.
        self.end = weakref.finalize(self, _end_processes, self.processes, shared_folder)
        steps_file(self.folder).write_bytes(bytes(2 * 8 * size))
        for rank in range(1, size):
            self.processes[rank] = _start(self.folder, rank)

    def configure(self, config: EngineConfig) -> None:
        """Send the settings to all rank processes, which then load the model.

        A process that has ended is skipped; `Ranks.check` reports it later.
        """
        for process in self.processes.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(config) + b"\n")


def steps_file(folder: Path) -> Path:
    """Return the path of the file with the step counters, which are two int64 per rank."""
    return folder / "steps"


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    # Its standard output joins our standard error: ours may carry our own lines only. Its standard input stays open as
    # long as this process lives, and the end of its standard input ends the rank.
    command = (*_RANK_COMMAND, str(folder), str(rank))
    return start(command, stdin=subprocess.PIPE, stdout=_STDERR, new_session=False)


def _end_processes(processes: Mapping[int, subprocess.Popen[bytes]], shared_folder: SocketFolder) -> None:
    for process in processes.values():
        process.kill()  # a stopped one, too
    for process in processes.values():
        process.wait()
    shared_folder.remove()
