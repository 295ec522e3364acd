"""The channel between the first front and another one: messages, and connections with them.

A socket pair that keeps messages apart (SOCK_SEQPACKET), for it also carries file descriptors, which a pipe cannot. Its
end means that the process at the other end is gone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

import msgspec

from meltcore.config import ServerConfig
from meltcore.engine.messages import EngineReady
from meltcore.server.generation import Outcome

MESSAGE_BYTES = 1 << 17  # the longest one; a server's configuration is a few kilobytes


class Setup(msgspec.Struct, tag="setup", frozen=True):
    """The first message. With it comes the descriptor of the board."""

    config: ServerConfig
    front: int  # its row of the board and its sockets to the engine; the first front is 0
    fronts: int
    directory: str  # of the sockets to the engine


class Open(msgspec.Struct, tag="open", frozen=True):
    """The engine is ready: take connections from now on. Answered by `Opened`."""

    engine: EngineReady
    created: int


class Connection(msgspec.Struct, tag="connection", frozen=True):
    """A client's connection, whose descriptor comes with it, is yours."""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Refuse new requests, saying `reason`."""

    reason: str


class EndRequests(msgspec.Struct, tag="end", frozen=True):
    """End every open request with an error."""

    message: str
    status: int
    code: str
    outcome: Outcome


class ReplicaDied(msgspec.Struct, tag="died", frozen=True):
    """End every open request of this replica; it stays out of use."""

    replica: int
    how: str


class Leave(msgspec.Struct, tag="leave", frozen=True):
    """Close connections and exit."""


class Opened(msgspec.Struct, tag="opened", frozen=True):
    pass


class CannotGoOn(msgspec.Struct, tag="failed", frozen=True):
    """This front cannot start (`where` is "start"), or the engine of `replica` says what cannot be read ("engine")."""

    where: Literal["start", "engine"]
    message: str
    replica: int = 0


ToFront = Setup | Open | Connection | Drain | EndRequests | ReplicaDied | Leave
FromFront = Opened | CannotGoOn
_Message = TypeVar("_Message")
_encode = msgspec.msgpack.Encoder().encode
_CONNECTION = _encode(Connection())


class Channel(Generic[_Message]):
    """One end of a channel; `incoming` is the union of the messages that come in here."""

    def __init__(self, end: socket.socket, incoming: Any) -> None:
        end.setblocking(False)
        self._socket = end
        self._decode = msgspec.msgpack.Decoder(incoming).decode

    def send(self, message: ToFront | FromFront, descriptor: int | None = None) -> bool:
        """Send now. False where the other end is gone, or reads so little that there is no room."""
        return self._send(_encode(message), descriptor)

    def send_connection(self, connection: socket.socket) -> bool:
        """Give `connection` away; ours is closed. False as `send`: then it is still ours."""
        if not self._send(_CONNECTION, connection.fileno()):
            return False
        connection.close()
        return True

    def read(self, on_message: Callable[[_Message, list[int]], None], on_end: Callable[[], None]) -> None:
        """From now on call `on_message` for each message with its descriptors, and `on_end` once, at the end."""

        def readable() -> None:
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

        asyncio.get_running_loop().add_reader(self._socket.fileno(), readable)

    def close(self) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()

    def _send(self, data: bytes, descriptor: int | None) -> bool:
        try:
            socket.send_fds(self._socket, [data], [] if descriptor is None else [descriptor])
        except OSError:  # no room, the other end gone, or (ETOOMANYREFS) too many descriptors on their way
            return False
        return True
