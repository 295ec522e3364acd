"""Implements the channel between the supervisor and an API server process: messages, and connections with them.

The channel is a socket pair that preserves message boundaries (SOCK_SEQPACKET), because a socket can carry file
descriptors, which a pipe cannot. End-of-file on the socket means that the process at the other end is gone.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import msgspec

from meltcore.settings.config import ModelStatus
from meltcore.settings.fleet_spec import FleetSpec, ModelSection
from meltcore.settings.routes_section import LanguagesSection, RoutesSection

MESSAGE_BYTES = 1 << 17  # the longest message; a model's configuration takes a few kilobytes

# --- supervisor to API server --------------------------------------------------------------------------------------


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """Starts a process, as the first message. The descriptor of the server's statistics comes with it.

    The process answers with `Started`.
    """

    config: FleetSpec  # without models and routes, which follow
    api_server: int  # its row of the statistics and its sockets to the engines, from 1 on
    num_processes: int  # rows of the statistics: the API servers and the supervisor
    directory: str  # of the sockets
    name: str  # of the server, in `Via`


class OpenModel(msgspec.Struct, tag="open_model", frozen=True):
    """Reports that the engines of a model are ready.

    The process answers with `ModelOpened` once it has the tokenizer.
    """

    model: int
    engine: msgspec.Raw  # in msgpack: its type is one of the task's
    created: int


class StatusChanged(msgspec.Struct, tag="status", frozen=True):
    """Reports the new status of a model, and the reason that refused requests receive."""

    model: int
    status: ModelStatus
    reason: str


class AddModel(msgspec.Struct, tag="add_model", frozen=True):
    """Adds a model, or replaces the model of this number, whose task was unknown.

    The descriptor of the model's statistics comes with the message.

    The process loads the tokenizer of a model of Meltcore's own engines. For a model of other servers it answers with
    `ModelOpened`.

    Args:
        task: The model's task. None means that the task is unknown: it is looked up, or cannot be found.
        engines: The number of each replica's engine, which names the folder of its sockets. None stands for a replica
            without an engine.
        urls: The address of each replica of a model of other servers.
        open: The message that opened the model, for a process that starts later.
        status: The last status, for a process that starts later.
    """

    model: int
    name: str
    config: ModelSection
    task: str | None
    engines: list[int | None] = []
    urls: list[str] = []
    open: OpenModel | None = None
    status: StatusChanged | None = None


class RemoveModel(msgspec.Struct, tag="remove_model", frozen=True):
    """Removes a model from the server. All its requests have ended."""

    model: int


class RoutesChanged(msgspec.Struct, tag="routes", frozen=True):
    """Tells the process, at its start and after each change, the configured models of languages and routes.

    `order` has the names of the models that come first.
    """

    order: tuple[str, ...]
    languages: LanguagesSection
    routes: RoutesSection


class AddConnection(msgspec.Struct, tag="connection", frozen=True):
    """Passes a client's connection to the process. The connection's descriptor comes with the message."""


class EndRequests(msgspec.Struct, tag="end", frozen=True):
    """Ends the open requests of a model, or of one of its replicas, with an error."""

    model: int
    message: str
    status: int
    code: str
    replica: int | None = None


class ReplicaStarted(msgspec.Struct, tag="replica_started", frozen=True):
    """Reports that a replica's engine is being started. The process binds the sockets to which the engine connects.

    The statistics say when the replica receives requests.
    """

    model: int
    replica: int
    engine: int


class ReplicaEnded(msgspec.Struct, tag="replica_ended", frozen=True):
    """Reports that a replica's engine has died or was stopped.

    The process ends the replica's requests with `message` and closes the sockets.
    """

    model: int
    replica: int
    message: str


class Exit(msgspec.Struct, tag="exit", frozen=True):
    """Tells the process to close its connections and to exit."""


# --- API server to supervisor --------------------------------------------------------------------------------------


class Started(msgspec.Struct, tag="started", frozen=True):
    """Reports that the process serves connections. It refuses requests for a model until the model is open."""


class ModelOpened(msgspec.Struct, tag="opened", frozen=True):
    """Reports that the process can serve a model.

    If `synthetic` is true, the tokenizer of the model is a substitute. A speech model then has substitute tokens.
    """

    model: int
    synthetic: bool


class ModelFailed(msgspec.Struct, tag="model_failed", frozen=True):
    """Reports that this process cannot load the files that it needs for a model."""

    model: int
    message: str


class EngineUnreadable(msgspec.Struct, tag="unreadable", frozen=True):
    """Reports that the process received a message of an engine that it cannot decode."""

    model: int
    replica: int
    message: str


ToAPIServer = (
    Setup
    | AddModel
    | RemoveModel
    | RoutesChanged
    | OpenModel
    | StatusChanged
    | AddConnection
    | EndRequests
    | ReplicaStarted
    | ReplicaEnded
    | Exit
)
FromAPIServer = Started | ModelOpened | ModelFailed | EngineUnreadable
_Message = TypeVar("_Message")
_encode = msgspec.msgpack.Encoder().encode
_CONNECTION = _encode(AddConnection())


class Channel(Generic[_Message]):
    """Sends and receives messages at one end of a channel.

    `message_type` is the union of the messages that arrive here.
    """

    def __init__(self, sock: socket.socket, message_type: Any) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decode = msgspec.msgpack.Decoder(message_type).decode

    def send(self, message: ToAPIServer | FromAPIServer, descriptor: int | None = None) -> bool:
        """Send a message without waiting. Return whether it was sent.

        It is not sent if the other end is gone, or has read so little that the buffer is full.
        """
        return self._send(_encode(message), descriptor)

    def send_connection(self, connection: socket.socket) -> bool:
        """Pass `connection` to the other end and close it in this process. Return whether it was sent.

        If it was not sent, for the same reasons as in `send`, the connection stays open in this process.
        """
        if not self._send(_CONNECTION, connection.fileno()):
            return False
        connection.close()
        return True

    def read(self, on_message: Callable[[_Message, list[int]], None], on_end: Callable[[], object]) -> None:
        """Call `on_message` for each message with its descriptors from now on, and `on_end` once at end-of-file."""

        def on_readable() -> None:
            while self._socket.fileno() >= 0:
                try:
                    data, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES, 1)
                except BlockingIOError:
                    return
                except ConnectionError:
                    data = b""
                if not data:
                    self.close()
                    on_end()
                    return
                on_message(self._decode(data), descriptors)

        asyncio.get_running_loop().add_reader(self._socket.fileno(), on_readable)

    def close(self) -> None:
        """Close this end. A second call does nothing."""
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()

    def _send(self, data: bytes, descriptor: int | None) -> bool:
        try:
            socket.send_fds(self._socket, [data], [] if descriptor is None else [descriptor])
        except OSError:  # a full buffer, no other end, or (ETOOMANYREFS) too many descriptors in flight
            return False
        return True


def take_unread_connections(end: socket.socket) -> list[socket.socket]:
    """Return the connections that were sent to `end` of a channel and were not read there, and close `end`."""
    connections = []
    end.setblocking(False)
    with end, suppress(BlockingIOError, ConnectionError):
        while True:
            data, descriptors, _, _ = socket.recv_fds(end, MESSAGE_BYTES, 1)
            if not data:
                break
            if data == _CONNECTION:
                connections += [socket.socket(fileno=descriptor) for descriptor in descriptors]
            else:
                for descriptor in descriptors:
                    os.close(descriptor)
    return connections
