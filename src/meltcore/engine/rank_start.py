"""Starts the processes of ranks 1 and up. No torch: they import it for as long as we do, so they are started first."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from meltcore.config import EngineConfig
from meltcore.engine.socket_folder import SocketFolder

_RANK_COMMAND = (sys.executable, "-m", "meltcore.engine.rank_process")
_STDERR = 2


class StartedRanks:
    """They import what they need, and wait for `configure`. `end` ends them; so does our end, however it comes.

    folder: of what they share with us, their sockets for one; processes: by rank.
    """

    def __init__(self, size: int) -> None:
        """size: ranks in all, rank 0 among them. Raises ConfigError where no folder can be made to share."""
        shared = SocketFolder("group")
        self.folder = shared.path
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        # Runs when we are collected or the interpreter ends, whichever is first.
        self.end = weakref.finalize(self, _end, self.processes, shared)
        steps_file(self.folder).write_bytes(bytes(2 * 8 * size))
        for rank in range(1, size):
            self.processes[rank] = _start(self.folder, rank)

    def configure(self, config: EngineConfig) -> None:
        """Have them load. Who is gone already is not told: `Ranks.check` says how it ended."""
        for process in self.processes.values():
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.write(msgspec.json.encode(config) + b"\n")
                process.stdin.flush()


def steps_file(folder: Path) -> Path:
    """Two int64 for each rank; see `ranks.step_board`."""
    return folder / "steps"


def _start(folder: Path, rank: int) -> subprocess.Popen[bytes]:
    # Its standard output joins our standard error: ours may hold nothing but our own lines. Its standard input stays
    # open as long as we live, and its end is the end of the rank.
    return subprocess.Popen([*_RANK_COMMAND, str(folder), str(rank)], stdin=subprocess.PIPE, stdout=_STDERR)


def _end(processes: Mapping[int, subprocess.Popen[bytes]], shared: SocketFolder) -> None:
    for process in processes.values():
        process.kill()  # one that is stopped, too
    for process in processes.values():
        process.wait()
    shared.remove()
