"""Connects one process of the server with one engine by sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from meltcore.protocol.engines import FromEngine, ToEngine
from meltcore.protocol.tcp import read_address
from meltcore.serve.engines.engine_sockets import EngineSockets, LocalSockets, RemoteSocket

_RETRY_S = 0.01


def socket_folder(directory: Path, engine: int) -> Path:
    """Return the folder for an engine's sockets. The folder is created if it is missing."""
    folder = directory / str(engine)
    folder.mkdir(exist_ok=True)
    return folder


class EngineLink:
    """Sends messages to an engine. Each message from the engine is passed to `on_message` on the event loop.

    If a message cannot be decoded, `on_unreadable` is called with a reason, because no later message can be trusted. If
    the connection to an engine on another machine is lost, `on_lost` is called, because messages may be lost too.
    """

    def __init__(
        self,
        directory: Path,
        client_index: int,
        on_message: Callable[[FromEngine], None],
        on_unreadable: Callable[[str], object],
        on_lost: Callable[[str], object] = lambda _reason: None,
    ) -> None:
        """Open the sockets of a client in `directory`. Client 0 is the supervisor.

        A running event loop reads the sockets. They are bound for an engine on this machine, and connected to an engine
        on another machine. Raises EngineDeadError if the folder is gone.
        """
        self._on_message = on_message
        self._on_unreadable = on_unreadable
        self._outgoing: list[ToEngine] = []
        address = read_address(directory)
        self._sockets: EngineSockets | None
        if address is None:
            self._sockets = LocalSockets(directory, client_index)
        else:
            self._sockets = RemoteSocket(address, client_index, on_lost)
        asyncio.get_running_loop().add_reader(self._sockets.descriptor, self.receive)
        # The descriptor signals for what arrives after a first look.
        asyncio.get_running_loop().call_soon(self.receive)

    @property
    def is_connected(self) -> bool:
        """Whether an engine on another machine is connected now."""
        return self._sockets is not None and self._sockets.is_connected

    def send(self, message: ToEngine) -> None:
        """Queue a message. Messages of one iteration of the event loop are sent together.

        After `close` no message is sent.
        """
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self.flush)
        self._outgoing.append(message)

    def flush(self) -> None:
        """Send the queued messages now, or soon afterwards if the engine is not connected."""
        messages, self._outgoing = self._outgoing, []
        if not messages or self._sockets is None:
            return
        try:
            self._sockets.send(messages)
        except zmq.Again:
            # The engine has not connected to a process that has just started; or it is dead, and its watcher will end
            # the requests.
            self._outgoing = messages
            asyncio.get_running_loop().call_later(_RETRY_S, self.flush)
            return
        if self._sockets.is_shared:  # to send may use up the signal of its descriptor for what has arrived
            asyncio.get_running_loop().call_soon(self.receive)

    def receive(self) -> None:
        """Handle all messages that have arrived."""
        # The descriptor signals once for any number of messages, so all are read. This also lets a process that has
        # fallen behind catch up: the tokens of several steps are handled before any is sent on, and leave together.
        while self._sockets is not None:
            try:
                message = self._sockets.receive()
            except zmq.Again:
                return
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
        """Close the sockets. Can be called twice."""
        if self._sockets is None:
            return
        asyncio.get_running_loop().remove_reader(self._sockets.descriptor)
        self._sockets.close()
        self._sockets = None
