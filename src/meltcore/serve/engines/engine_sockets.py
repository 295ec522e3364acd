"""The ZeroMQ sockets between a process of the server and one engine, on this machine (ipc) or on another one (TCP)."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from meltcore.common.errors import EngineDeadError
from meltcore.protocol.engines import FromEngine, ToEngine, from_engine
from meltcore.protocol.sockets import socket_address
from meltcore.protocol.tcp import (
    EngineAddress,
    client_identity,
    decode_message,
    encode_message,
    set_heartbeats,
    shift_times,
)

CONNECT_LIMIT_S = 10.0
_MAX_SOCKETS = 65_535  # of a process: three for each engine of a cluster, and ZeroMQ allows 1,023 by default


class EngineSockets(Protocol):
    """Defines the sockets that an `EngineLink` uses. If `is_shared`, one socket sends and receives.

    `is_connected` says whether an engine on another machine is connected now.
    """

    descriptor: int
    is_shared: bool
    is_connected: bool

    def send(self, messages: list[ToEngine]) -> None:
        """Send messages together. Raises zmq.Again if the engine is not connected."""

    def receive(self) -> FromEngine:
        """Return the next message.

        Raises zmq.Again if no message has arrived, and msgspec.DecodeError for a message that cannot be decoded.
        """

    def close(self) -> None:
        """Close the sockets now. Queued messages are lost."""


class LocalSockets:
    """Has two ipc sockets that are bound in this process. The engine on this machine connects to them."""

    is_shared = False
    is_connected = False

    def __init__(self, directory: Path, client_index: int) -> None:
        """Bind the sockets of a client in `directory`. Raises EngineDeadError if the folder is gone."""
        self._encode = msgspec.msgpack.Encoder().encode
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(from_engine())
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.set_hwm(0)  # admission bounds what is in flight; a limit here would block the event loop
            socket.setsockopt(zmq.LINGER, 0)
        try:
            self._to_engine.bind(socket_address(directory, "to-engine", client_index))
            self._from_engine.bind(socket_address(directory, "from-engine", client_index))
        except zmq.ZMQError as error:
            self.close()
            if error.errno != errno.ENOENT:
                raise
            raise EngineDeadError("the engine has ended: the folder of its sockets is gone") from error
        self.descriptor = int(self._from_engine.FD)

    def send(self, messages: list[ToEngine]) -> None:
        """Send messages together. Raises zmq.Again while the engine is not connected."""
        self._to_engine.send(self._encode(messages), zmq.NOBLOCK)

    def receive(self) -> FromEngine:
        """Return the next message.

        Raises zmq.Again if no message has arrived, and msgspec.DecodeError for a message that cannot be decoded.
        """
        return self._decoder.decode(self._from_engine.recv(zmq.NOBLOCK))

    def close(self) -> None:
        """Close the sockets now. Queued messages are lost."""
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()


class RemoteSocket:
    """Has one encrypted TCP socket to an engine on another machine, and a monitor of the connection.

    `on_lost` is called with a reason if there is no connection within CONNECT_LIMIT_S, and when a connection is lost.
    ZeroMQ connects again by itself. All sockets of a process share one context, whose two threads serve any number of
    engines.
    """

    is_shared = True
    _context: zmq.Context[zmq.Socket[bytes]] | None = None

    def __init__(self, address: EngineAddress, client_index: int, on_lost: Callable[[str], object]) -> None:
        self._address = address
        self._on_lost = on_lost
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(from_engine())
        self._socket = socket = self._shared_context().socket(zmq.DEALER)
        socket.set_hwm(0)  # as for LocalSockets
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.IDENTITY, client_identity(client_index))
        socket.curve_serverkey = address.engine_key.encode()
        keys = address.client_keys
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        set_heartbeats(socket)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_DISCONNECTED
        self._monitor = socket.get_monitor_socket(events)
        self.is_connected = self._is_closed = False
        self.descriptor = int(socket.FD)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._monitor.FD, self._on_event)
        self._deadline = loop.call_later(CONNECT_LIMIT_S, self._lose, f"no connection within {CONNECT_LIMIT_S:g} s")
        socket.connect(address.url)
        self.send([])  # the engine waits for the supervisor's first message
        loop.call_soon(self._on_event)

    def send(self, messages: list[ToEngine]) -> None:
        """Send messages together. Without a connection they wait until there is one."""
        self._socket.send(encode_message(self._encoder, messages), zmq.NOBLOCK)

    def receive(self) -> FromEngine:
        """Return the next message.

        Raises zmq.Again if no message has arrived, and msgspec.DecodeError for a message that cannot be decoded.
        """
        message, offset_s = decode_message(self._decoder, self._socket.recv(zmq.NOBLOCK))
        return shift_times(message, offset_s)

    def close(self) -> None:
        """Close the socket now. Queued messages are lost."""
        self._is_closed = True
        self._deadline.cancel()
        asyncio.get_running_loop().remove_reader(self._monitor.FD)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()

    @staticmethod
    def _shared_context() -> zmq.Context[zmq.Socket[bytes]]:
        if RemoteSocket._context is None:
            RemoteSocket._context = zmq.Context()
            RemoteSocket._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        return RemoteSocket._context

    def _on_event(self) -> None:
        while not self._is_closed and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.is_connected = True
                self._deadline.cancel()
            elif event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                self._lose("it refuses the keys of this fleet")
            elif self.is_connected:
                self.is_connected = False
                self._lose("the connection is lost")

    def _lose(self, reason: str) -> None:
        self._on_lost(f"the engine on {self._address.name} cannot be reached: {reason}")
