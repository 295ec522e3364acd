"""Measures what else used the cores of this machine during a level, and says how that may have changed the result."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from meltcore.common.process import stat_fields
from meltcore.measure.load.run.client_monitor import MIN_DURATION_S
from meltcore.measure.load.wire.connection import Target

MAX_OTHER_SHARE = 0.10  # of the cores that this process may use
MAX_STEAL_SHARE = 0.02
MIN_LEVEL_S = 10.0  # a shorter level is mostly ramp and drain, and five of one setting differed by 2.7 times
MIN_ANSWERS_FOR_P99 = 1_000

_PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_CPU_LINE = re.compile(r"^cpu([0-9]+) (.+)$", re.MULTILINE)
_LISTENING = "0A"  # the state of a socket in /proc/net/tcp


class _CoreTicks(NamedTuple):
    """The clock ticks since boot of the cores that this process may use."""

    busy: int
    stolen: int


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """Describes the machine of the load generator during a level.

    Shares are fractions of the `cores` that this process may use. `other_share` leaves out the load generator and a
    server on this machine. A share that could not be measured is None.
    """

    cores: int
    is_server_local: bool
    client_share: float | None = None
    server_share: float | None = None
    other_share: float | None = None
    steal_share: float | None = None


class SurroundingsMonitor:
    """Reads the CPU time of this machine and of the processes that belong to the measurement.

    Processes started by this process count as the load generator, or as the server that they listen for. Without a
    `target`, all of them count as the load generator.
    """

    def __init__(self, target: Target | None = None) -> None:
        self._cores = os.sched_getaffinity(0)
        self._is_server_local = target is not None and _is_local(target.address)
        listeners = _listeners(target.port) if target is not None and self._is_server_local else []
        stats = _process_stats()
        own_line = _ancestors(os.getpid(), stats)
        self._server_roots = {_top_ancestor(pid, stats, own_line) for pid in listeners}
        self._start_s = 0.0
        self._start_core_ticks = _CoreTicks(0, 0)
        self._start_ticks: list[int] = []

    def start(self) -> None:
        """Read the CPU times at the start of a level."""
        self._start_s = time.monotonic()
        self._start_core_ticks, self._start_ticks = self._read()

    def finish(self) -> Surroundings:
        """Return what happened since `start`. A time below MIN_DURATION_S has too few clock ticks to be measured."""
        duration_s = time.monotonic() - self._start_s
        cores = len(self._cores)
        surroundings = Surroundings(cores=cores, is_server_local=self._is_server_local)
        if duration_s < MIN_DURATION_S:
            return surroundings
        core_ticks, ticks = self._read()
        available_ticks = duration_s * _TICKS_PER_S * cores
        client_share, server_share = (
            max(0, end - start) / available_ticks for start, end in zip(self._start_ticks, ticks, strict=True)
        )
        busy_share = (core_ticks.busy - self._start_core_ticks.busy) / available_ticks
        has_server = bool(self._server_roots)
        is_known = has_server or not self._is_server_local
        return Surroundings(
            cores=cores,
            is_server_local=self._is_server_local,
            client_share=client_share,
            server_share=server_share if has_server else None,
            other_share=max(0.0, busy_share - client_share - server_share) if is_known else None,
            steal_share=(core_ticks.stolen - self._start_core_ticks.stolen) / available_ticks,
        )

    def _read(self) -> tuple[_CoreTicks, list[int]]:
        """Return the ticks of the cores, and the ticks of the processes of the load generator and of the server."""
        ticks = [0, 0]
        stats, own_pid = _process_stats(), os.getpid()
        for pid, fields in stats.items():
            line = _ancestors(pid, stats)
            is_server = not self._server_roots.isdisjoint(line)
            if is_server or own_pid in line:
                ticks[is_server] += sum(map(int, fields[11:15]))  # its own, and of its children that have ended
        return _core_ticks(_core_text(), self._cores), ticks


def cautions(surroundings: Surroundings | None, *, duration_s: float, num_answers: int) -> dict[str, str]:
    """Return what makes the numbers of a level less certain, by its kind. Each text names a number and its limit."""
    found = {} if surroundings is None else machine_cautions(surroundings)
    if duration_s < MIN_LEVEL_S:
        found["short level"] = f"the level lasted {duration_s:.1f} s; limit {MIN_LEVEL_S:g} s"
    if num_answers < MIN_ANSWERS_FOR_P99:
        found["few answers"] = f"{num_answers:,} complete answers; a steady p99 needs {MIN_ANSWERS_FOR_P99:,}"
    return found


def machine_cautions(surroundings: Surroundings) -> dict[str, str]:
    """Return the cautions about the machine of the load generator, by their kind."""
    found, cores = {}, surroundings.cores
    if surroundings.is_server_local:
        used = [
            f"the {name} used {share * cores:.1f}"
            for name, share in (("generator", surroundings.client_share), ("server", surroundings.server_share))
            if share is not None
        ]
        used_text = f" ({', '.join(used)})" * bool(used)
        found["one machine"] = (
            f"server and load generator shared the {cores} cores of one machine and slowed each other{used_text}: send "
            f"the load from another machine to measure the server alone"
        )
        if surroundings.client_share is not None and surroundings.other_share is None:
            found["other processes"] = (
                "no process of the server can be read, so the CPU of other processes is unknown; limit "
                f"{MAX_OTHER_SHARE:.0%} of the cores"
            )
    if surroundings.other_share is not None and surroundings.other_share > MAX_OTHER_SHARE:
        found["other processes"] = (
            f"other processes used {surroundings.other_share * cores:.1f} of {cores} cores; limit "
            f"{MAX_OTHER_SHARE * cores:.1f}"
        )
    if surroundings.steal_share is not None and surroundings.steal_share > MAX_STEAL_SHARE:
        found["steal"] = (
            f"the hypervisor took {surroundings.steal_share:.1%} of the cores' time for others; limit "
            f"{MAX_STEAL_SHARE:.0%}"
        )
    return found


def _is_local(address: str) -> bool:
    """Return whether this machine has the IP address. Only a machine's own addresses can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as udp_socket:
            udp_socket.bind((address, 0))
    except OSError:
        return False
    return True


def _core_text() -> str:
    return (_PROC / "stat").read_text()


def _core_ticks(stat_text: str, cores: set[int]) -> _CoreTicks:
    """Return the ticks of `cores` in the text of /proc/stat (proc(5))."""
    busy = stolen = 0
    for core, fields_text in _CPU_LINE.findall(stat_text):
        if int(core) in cores:
            user, nice, system, _idle, _iowait, irq, soft_irq, steal, *_ = map(int, fields_text.split())
            busy += user + nice + system + irq + soft_irq
            stolen += steal
    return _CoreTicks(busy, stolen)


def _process_stats() -> dict[int, list[str]]:
    """Return the fields of /proc/PID/stat of each process, as `stat_fields` does."""
    pids = (int(path.name) for path in _PROC.glob("[0-9]*"))
    return {pid: fields for pid in pids if (fields := stat_fields(pid)) is not None}


def _ancestors(pid: int, stats: dict[int, list[str]]) -> list[int]:
    """Return `pid`, its parent and so on, without the process 1."""
    line = []
    while pid > 1 and pid not in line:
        line.append(pid)
        pid = int(stats[pid][1]) if pid in stats else 0
    return line


def _top_ancestor(pid: int, stats: dict[int, list[str]], own_line: Sequence[int]) -> int:
    """Return the highest ancestor of `pid` that is no ancestor of this process: the first process of the server.

    A process of this process itself, as a server in a test, is its own ancestor.
    """
    outside = [each for each in _ancestors(pid, stats) if each not in own_line]
    return outside[-1] if outside else pid


def _listeners(port: int) -> list[int]:
    """Return the readable processes that listen at a TCP port of this machine."""
    sockets = set()
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in (_PROC / "net" / name).read_text().splitlines()[1:]]
            sockets |= {
                f"socket:[{row[9]}]"
                for row in rows
                if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port
            }
    return [int(path.name) for path in _PROC.glob("[0-9]*") if sockets and _has_socket(path, sockets)]


def _has_socket(process_path: Path, sockets: set[str]) -> bool:
    try:
        for descriptor in (process_path / "fd").iterdir():
            with suppress(OSError):
                if str(descriptor.readlink()) in sockets:
                    return True
    except OSError:
        return False  # of another user, or gone
    return False
