"""A front's two sockets to the engine. Everything above need not know where the engine lives."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from meltcore.engine.messages import FromEngine, ToEngine, socket_address

_RETRY_S = 0.01


def socket_folder(directory: Path, replica: int) -> Path:
    """Where the sockets of one replica are, made where it is missing."""
    folder = directory / str(replica)
    folder.mkdir(exist_ok=True)
    return folder


class EngineLink:
    """Sends to the engine, and hands each of its messages for this front to `on_message`, on the event loop.

    A message that cannot be read goes to `on_unreadable` as a line that says so: nothing said later can be trusted.
    """

    def __init__(
        self,
        directory: Path,
        front: int,
        on_message: Callable[[FromEngine], None],
        on_unreadable: Callable[[str], object],
    ) -> None:
        """Bind the sockets of `front` in `directory`; a running event loop will read them."""
        self._on_message = on_message
        self._on_unreadable = on_unreadable
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._outgoing: list[ToEngine] = []
        self._context: zmq.Context[zmq.Socket[bytes]] | None = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.set_hwm(0)  # admission bounds what is under way; a limit here would block the event loop
            socket.setsockopt(zmq.LINGER, 0)
        self._to_engine.bind(socket_address(directory, "to-engine", front))
        self._from_engine.bind(socket_address(directory, "from-engine", front))
        asyncio.get_running_loop().add_reader(self._from_engine.FD, self.receive)

    def send(self, message: ToEngine) -> None:
        """Queue a message; all of one turn of the event loop travel together. Nothing is sent once it is closed."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing.append(message)

    def flush(self) -> None:
        """Send what is queued now, or a little later where the engine is not connected."""
        messages, self._outgoing = self._outgoing, []
        if not messages or self._context is None:
            return
        try:
            self._to_engine.send(self._encode(messages), zmq.NOBLOCK)
        except zmq.Again:
            # It has not found the sockets of a front that has just started; or it is dead, and whoever watches it will
            # end the requests.
            self._outgoing = messages
            asyncio.get_running_loop().call_later(_RETRY_S, self.flush)

    def receive(self) -> None:
        """Take in all that has come."""
        # The descriptor signals once for any number of messages, so all of them are read. It is also what keeps a slow
        # front from falling behind for good: the tokens of several steps are taken in before any of them is sent on,
        # and leave together.
        while self._context is not None:
            try:
                data = self._from_engine.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._decode(data)
            except msgspec.DecodeError as error:
                self._on_unreadable(f"the engine sent a message that the front cannot read: {error}")
                continue
            try:
                self._on_message(message)
            except Exception:
                # The loop reports it. The descriptor will not signal again for what is still in the socket.
                asyncio.get_running_loop().call_soon(self.receive)
                raise

    def close(self) -> None:
        """Drop both sockets. Can be called twice."""
        if self._context is None:
            return
        asyncio.get_running_loop().remove_reader(self._from_engine.FD)
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()
        self._context = None
