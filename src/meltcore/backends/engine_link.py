"""The two sockets between one process of the server and one engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from meltcore.protocol.engines import FromEngine, ToEngine
from meltcore.protocol.sockets import socket_address

_RETRY_S = 0.01


def socket_folder(directory: Path, engine: int) -> Path:
    """Return the folder of an engine's sockets, created if it is missing."""
    folder = directory / str(engine)
    folder.mkdir(exist_ok=True)
    return folder


class EngineLink:
    """Sends messages to an engine, and calls `on_message` on the event loop for each of its messages to this process.

    A message that cannot be decoded is reported to `on_unreadable` as one line: nothing sent later can be trusted.
    """

    def __init__(
        self,
        directory: Path,
        client_index: int,
        on_message: Callable[[FromEngine], None],
        on_unreadable: Callable[[str], object],
    ) -> None:
        """Bind the sockets of a client (0: the supervisor) in `directory`. A running event loop will read them."""
        self._on_message = on_message
        self._on_unreadable = on_unreadable
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._outgoing: list[ToEngine] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.set_hwm(0)  # admission bounds what is in flight; a limit here would block the event loop
            socket.setsockopt(zmq.LINGER, 0)
        self._to_engine.bind(socket_address(directory, "to-engine", client_index))
        self._from_engine.bind(socket_address(directory, "from-engine", client_index))
        asyncio.get_running_loop().add_reader(self._from_engine.FD, self.receive)

    def send(self, message: ToEngine) -> None:
        """Queue a message. Those of one iteration of the event loop are sent together, none after `close`."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing.append(message)

    def flush(self) -> None:
        """Send what is queued, now or soon after when the engine is not connected."""
        messages, self._outgoing = self._outgoing, []
        if not messages or self._context is None:
            return
        try:
            self._to_engine.send(self._encode(messages), zmq.NOBLOCK)
        except zmq.Again:
            # The engine has not connected to a process that has just started; or it is dead, and its watcher will end
            # the requests.
            self._outgoing = messages
            asyncio.get_running_loop().call_later(_RETRY_S, self.flush)

    def receive(self) -> None:
        """Handle all messages that have arrived."""
        # The descriptor signals once for any number of messages, so all are read. This also lets a process that has
        # fallen behind catch up: the tokens of several steps are handled before any is sent on, and leave together.
        while self._context is not None:
            try:
                data = self._from_engine.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(data)
            except msgspec.DecodeError as error:
                self._on_unreadable(f"the engine sent a message that cannot be read: {error}")
                continue
            try:
                self._on_message(message)
            except Exception:
                # The event loop reports it. The descriptor will not signal again for what is still in the socket.
                asyncio.get_running_loop().call_soon(self.receive)
                raise

    def close(self) -> None:
        """Close both sockets. Can be called twice."""
        if self._context is None:
            return
        asyncio.get_running_loop().remove_reader(self._from_engine.FD)
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()
        self._context = None
