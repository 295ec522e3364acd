"""A further front process: `python -m meltcore.server.front_process`, with its channel as standard input.

It serves the connections that the first front gives it, with its own sockets to the engine and its own row of the
board. The end of the channel means that the server is gone, and so does this process go.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvloop

from meltcore.errors import MeltcoreError, RequestError
from meltcore.server.board import Board
from meltcore.server.channel import (
    MESSAGE_BYTES,
    CannotGoOn,
    Channel,
    Connection,
    Drain,
    EndRequests,
    Leave,
    Open,
    Opened,
    ReplicaDied,
    Setup,
    ToFront,
)
from meltcore.server.counts import Counts, columns
from meltcore.server.front import Front
from meltcore.server.http_server import HttpServer, calm_collector
from meltcore.server.link import EngineLink, socket_folder
from meltcore.server.listener import raise_file_limit
from meltcore.server.model import find_checkpoint, load_text
from meltcore.server.routes import build_app


class FrontProcess:
    """One further front, from its setup to its end."""

    def __init__(self, end: socket.socket, setup: Setup, board: int) -> None:
        replicas = setup.config.dp
        counts = Counts(Board(columns(replicas), setup.fronts, board), setup.front, replicas)
        self._channel: Channel[ToFront] = Channel(end, ToFront)
        self._links = [self._link(setup, replica) for replica in range(replicas)]
        self._front = Front(setup.config, counts, lambda message, replica: self._links[replica].send(message))
        self._http = HttpServer(build_app(self._front), counts)
        self._text = asyncio.create_task(
            asyncio.to_thread(lambda: load_text(setup.config, find_checkpoint(setup.config)))
        )
        self._opening: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until told to leave."""
        self._channel.read(self._obey, lambda: os._exit(0))
        await self._http.serve()
        for link in self._links:
            link.close()
        await asyncio.to_thread(self._front.log.close)

    def _obey(self, message: ToFront, descriptors: list[int]) -> None:
        front = self._front
        if isinstance(message, Connection):
            self._take(descriptors)
        elif isinstance(message, Open):
            self._opening = asyncio.create_task(self._open(message))
        elif isinstance(message, Drain):
            front.health.set("draining", message.reason)
        elif isinstance(message, EndRequests):
            error = RequestError(message.message, status=message.status, code=message.code)
            front.requests.end_all(error, message.outcome)
        elif isinstance(message, ReplicaDied):
            front.replica_died(message.replica, message.how)
            self._links[message.replica].close()
        elif isinstance(message, Leave):
            self._http.stop()

    def _take(self, descriptors: list[int]) -> None:
        """Serve a connection. Where this process has no room for its descriptor, the kernel has closed it already."""
        if descriptors:
            self._http.take(socket.socket(fileno=descriptors[0]))
        else:
            self._front.counts.add("connections_closed")
            self._front.log.write("connection_lost", error="no file descriptor is left")

    async def _open(self, message: Open) -> None:
        try:
            text = await self._text
        except MeltcoreError as error:
            self._channel.send(CannotGoOn("start", str(error)))
            return
        self._front.open(text, message.engine, message.created)
        calm_collector()
        self._channel.send(Opened())

    def _link(self, setup: Setup, replica: int) -> EngineLink:
        return EngineLink(
            socket_folder(Path(setup.directory), replica),
            setup.front,
            lambda message: self._front.on_message(message, replica),
            lambda why: self._channel.send(CannotGoOn("engine", why, replica)),
        )


def main() -> int:
    # The first front decides when we leave; a signal to the whole group of processes is for it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    raise_file_limit()
    end = socket.socket(fileno=sys.stdin.fileno())
    data, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES, 1)
    if not data:
        return 0  # nobody is left to serve for
    setup = msgspec.msgpack.decode(data, type=Setup)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(end, setup, descriptors[0]))
    return 0


async def _serve(end: socket.socket, setup: Setup, board: int) -> None:
    await FrontProcess(end, setup, board).run()


if __name__ == "__main__":
    sys.exit(main())
