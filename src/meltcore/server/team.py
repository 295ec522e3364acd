"""The further front processes of a server: started, given their part of the connections, watched, started again.

The first front is the server process itself. A server of one front has no other. With several, the first one accepts,
serves while it is alone (loading, or after deaths), and else gives each connection to whichever of the others has the
fewest: hashing them over several listening sockets (SO_REUSEPORT) leaves one front with a fifth more than its part at
400 connections, and would let a second server join a port in use.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meltcore.config import ServerConfig
from meltcore.engine.host_memory import ONE_ARENA
from meltcore.engine.messages import EngineReady
from meltcore.errors import ConfigError
from meltcore.server.channel import (
    Channel,
    Drain,
    EndRequests,
    FromFront,
    Leave,
    Open,
    Opened,
    ReplicaDied,
    Setup,
)
from meltcore.server.counts import Counts

_COMMAND = (sys.executable, "-m", "meltcore.server.front_process")
_STDERR = 2
# Python's own allocator keeps a megabyte for one object that is left in it: 50 MB for good after 2,500 streams a front.
# The C library's gives back all but the pages in use (idle.py asks it to), for a tenth more CPU a token.
_ALLOCATOR = {"PYTHONMALLOC": "malloc"}
_LEAVE_S = 4.0  # from asking a front to leave until it is killed; it closes its connections meanwhile
CORES_A_FRONT = 4
MOST_BY_DEFAULT = 4


def board_rows(fronts: int) -> int:
    """Processes with counts of their own: the first front, and the others where there are several."""
    return 1 if fronts == 1 else 1 + fronts


def front_count(config: ServerConfig) -> int:
    """How many fronts serve: what is asked for, else one for every four cores, at most four.

    A front moves about 40,000 tokens/s, and is late for all when it is busy for one. Engine and clients want cores too.
    """
    cores = len(os.sched_getaffinity(0))
    return config.fronts or max(1, min(MOST_BY_DEFAULT, cores // CORES_A_FRONT))


class Member:
    """One further front process. Until it is open it gets no connections."""

    def __init__(self, front: int) -> None:
        self.front = front
        self.given = 0.0  # connections, its predecessors' closed ones included
        self.process: asyncio.subprocess.Process | None = None
        self.channel: Channel[FromFront] | None = None
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return self.opened.done() and not self.opened.cancelled() and self.opened.exception() is None


class Team:
    """All fronts but the first; none in a server of one front."""

    def __init__(
        self,
        config: ServerConfig,
        counts: Counts,
        directory: Path,
        *,
        on_lost: Callable[[int, str, int], None],
        on_unreadable: Callable[[int, str], None],
    ) -> None:
        """`on_lost(front, how, open_requests)`: it has died. `on_unreadable(replica, why)`: that one talks nonsense."""
        self._config = config
        self._counts = counts
        self._directory = directory
        self._on_lost = on_lost
        self._on_unreadable = on_unreadable
        self._members: list[Member] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._open: Open | None = None
        self._all_opened = False  # until then none is given a connection: it would say ready while others are not
        self._draining = False
        self._leaving = False
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start every process; they load their text side by themselves."""
        for front in range(1, len(self._counts.board.rows)):
            member = Member(front)
            self._members.append(member)
            await self._start(member)

    async def open(self, engine: EngineReady, created: int) -> None:
        """Have all take requests, and wait until they can. Raises ConfigError where one cannot."""
        self._open = Open(engine, created)
        self.tell(self._open)
        all_open = asyncio.gather(*(member.opened for member in self._members))
        either: set[asyncio.Future[Any]] = {self.failed, all_open}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            raise ConfigError(self.failed.result())
        self._all_opened = True

    def place(self, connection: socket.socket) -> bool:
        """Give `connection` to the front with the fewest. False where none takes it: the first front serves it then."""
        closed = self._counts.board.column["connections_closed"]
        rows = self._counts.board.rows
        serving = [member for member in self._members if member.is_open] if self._all_opened else []
        for member in sorted(serving, key=lambda member: member.given - rows[member.front][closed]):
            if member.channel is not None and member.channel.send_connection(connection):
                member.given += 1
                return True
        return False

    def tell(self, message: Open | Drain | EndRequests | ReplicaDied | Leave) -> None:
        """Say something to every front. One that takes nothing any more hangs, and is ended."""
        self._draining |= isinstance(message, Drain) or not self._counts.living()
        for member in self._members:
            self._say(member, message)

    async def leave(self) -> None:
        """Have all close their connections and exit, by force where they do not in time."""
        self._leaving = True
        self.tell(Leave())
        if self._watches:
            await asyncio.wait(self._watches, timeout=_LEAVE_S)
        self.kill()
        await asyncio.gather(*self._watches, return_exceptions=True)

    def kill(self) -> None:
        """End all now."""
        self._leaving = True
        for member in self._members:
            if member.process is not None and member.process.returncode is None:
                member.process.kill()

    def _say(self, member: Member, message: Open | Drain | EndRequests | ReplicaDied | Leave) -> None:
        running = member.process is not None and member.process.returncode is None
        if running and member.channel is not None and not member.channel.send(message):
            assert member.process is not None
            member.process.kill()

    async def _start(self, member: Member) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A session of its own: a signal to our terminal or group is for us, who tell the others what to do.
        member.process = await asyncio.create_subprocess_exec(
            *_COMMAND,
            stdin=theirs.fileno(),
            stdout=_STDERR,
            start_new_session=True,
            env=os.environ | ONE_ARENA | _ALLOCATOR,
        )
        theirs.close()
        member.opened = asyncio.get_running_loop().create_future()
        member.given = self._counts.board.rows[member.front][self._counts.board.column["connections_closed"]]
        member.channel = Channel(ours, FromFront)
        member.channel.read(lambda message, _: self._hear(member, message), lambda: None)
        rows = len(self._counts.board.rows)
        setup = Setup(self._config, member.front, rows, str(self._directory))
        member.channel.send(setup, self._counts.board.fd)
        if self._open is not None:
            self._say(member, self._open)
        watch = asyncio.create_task(self._watch(member))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _hear(self, member: Member, message: FromFront) -> None:
        if isinstance(message, Opened):
            member.opened.set_result(None)
        elif message.where == "engine":
            self._on_unreadable(message.replica, message.message)
        else:
            self._fail(message.message)

    async def _watch(self, member: Member) -> None:
        """Wait for the end of `member`. It is started again, unless it never came to serve."""
        assert member.process is not None
        status = await member.process.wait()
        assert member.channel is not None
        member.channel.close()
        if self._leaving:
            return
        was_open = member.is_open
        member.opened = asyncio.get_running_loop().create_future()
        how = f"exit status {status}" if status >= 0 else f"killed by signal {-status}"
        if not was_open:
            self._fail(f"front process {member.front} ended while starting ({how})")
            return
        self._on_lost(member.front, how, self._write_off(member.front))
        if not self._draining:
            await self._start(member)

    def _write_off(self, front: int) -> int:
        """Count what a dead front had open as failed. Returns how many requests those were."""
        board = self._counts.board
        row, column = board.rows[front], board.column
        with board.locked():
            lost = round(row[column["in_flight"]])
            row[column["failed"]] += lost
            self._counts.forget_open(front)
        return lost

    def _fail(self, why: str) -> None:
        if not self.failed.done():
            self.failed.set_result(why)
