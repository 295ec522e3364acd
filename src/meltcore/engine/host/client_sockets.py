"""Connects an engine process to its clients by sockets, on this machine (ipc) or on another one (TCP)."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from meltcore.protocol.sockets import socket_address
from meltcore.protocol.tcp import (
    FIRST_CLIENT_S,
    ORPHAN_S,
    Binding,
    KeyPair,
    Listening,
    client_identity,
    decode_message,
    encode_message,
    read_binding,
    set_heartbeats,
    shift_times,
    write_listening,
)

# A message that cannot be delivered within this time means that the API server hangs.
_SEND_TIMEOUT_MS = 30_000
# Time for messages that are queued at the end of the process.
LINGER_MS = 1000
_WATCH_MS = 200
_HANDSHAKE_MS = 5000  # for a connection to show its key
_EXIT_ORPHANED = 4


class ClientSockets(Protocol):
    """Defines the sockets of an engine process. Clients are numbered; client 0 is the supervisor."""

    client_count: int

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a message from any client. Return whether there is one."""

    def receive(self, client_index: int) -> list[Any] | None:
        """Return the next messages that a client sent together, or None if no message has arrived."""

    def send(self, client_index: int, message: Any) -> None:
        """Send a message to a client."""

    def close(self) -> None:
        """Send queued messages within LINGER_MS, and close the sockets."""


def open_sockets(directory: Path, client_count: int, to_engine: Any) -> ClientSockets:
    """Return the sockets to all clients. `to_engine` is the union of the types of messages from clients."""
    binding = read_binding(directory)
    if binding is None:
        return LocalClients(directory, client_count, to_engine)
    return RemoteClients(directory, client_count, to_engine, binding)


class LocalClients:
    """Has two ipc sockets per client. The client binds both."""

    def __init__(self, directory: Path, client_count: int, to_engine: Any) -> None:
        self.client_count = client_count
        self._context = context = zmq.Context()
        self._receivers: list[zmq.Socket[bytes]] = []
        self._senders: list[zmq.Socket[bytes]] = []
        self._poller = zmq.Poller()
        for client_index in range(client_count):
            receiver, sender = context.socket(zmq.PULL), context.socket(zmq.PUSH)
            for socket in (receiver, sender):
                socket.set_hwm(0)
                socket.setsockopt(zmq.LINGER, LINGER_MS)
            sender.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
            receiver.connect(socket_address(directory, "to-engine", client_index))
            sender.connect(socket_address(directory, "from-engine", client_index))
            self._receivers.append(receiver)
            self._senders.append(sender)
            self._poller.register(receiver, zmq.POLLIN)
        self._decode = msgspec.msgpack.Decoder(list[to_engine]).decode
        self._encode = msgspec.msgpack.Encoder().encode

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a message from any client. Return whether there is one."""
        return bool(self._poller.poll(timeout_ms))

    def receive(self, client_index: int) -> list[Any] | None:
        """Return the next messages that a client sent together, or None if no message has arrived."""
        receiver = self._receivers[client_index]
        return self._decode(receiver.recv()) if receiver.poll(0) else None

    def send(self, client_index: int, message: Any) -> None:
        """Send a message to a client. Raises zmq.Again if the client does not read its messages."""
        self._senders[client_index].send(self._encode(message))

    def close(self) -> None:
        """Send queued messages within LINGER_MS, and close the sockets."""
        self._context.destroy(linger=LINGER_MS)


class RemoteClients:
    """Has one encrypted TCP socket for all clients. Only clients of the fleet are admitted.

    Messages to a client that is not connected are dropped, and the supervisor ends the client's requests. If no client
    has been connected for ORPHAN_S, the process exits in any state.
    """

    def __init__(self, directory: Path, client_count: int, to_engine: Any, binding: Binding) -> None:
        """Bind a free port, report it by `write_listening`, and wait for the supervisor's first message."""
        from zmq.auth.thread import ThreadAuthenticator  # with asyncio, which engines of this machine do not need

        self.client_count = client_count
        self._context = context = zmq.Context()
        self._admission = ThreadAuthenticator(context)
        self._admission.start()
        self._admission.configure_curve_callback("*", _AllowedClients(binding.client_key.encode()))
        self._socket = socket = context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # an API server that is started again has the index of the one before
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
        socket.curve_server = True
        keys = KeyPair.generate()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        set_heartbeats(socket)
        self._decoder = msgspec.msgpack.Decoder(list[to_engine])
        self._encoder = msgspec.msgpack.Encoder()
        self._arrived: list[deque[bytes]] = [deque() for _ in range(client_count)]
        self._identities = [client_identity(client_index) for client_index in range(client_count)]
        self._watch = _OrphanWatch(socket)
        self._watch.start()
        host = f"[{binding.host}]" if ":" in binding.host else binding.host
        port = socket.bind_to_random_port(f"tcp://{host}")
        write_listening(directory, Listening(port, keys.public))
        while not self._arrived[0]:  # an API server may be first
            socket.poll()
            self._read_messages()

    def poll(self, timeout_ms: int) -> bool:
        """Wait for a message from any client. Return whether there is one."""
        if not any(self._arrived) and self._socket.poll(timeout_ms):
            self._read_messages()
        return any(self._arrived)

    def receive(self, client_index: int) -> list[Any] | None:
        """Return the next messages that a client sent together, or None if no message has arrived."""
        self._read_messages()
        if not self._arrived[client_index]:
            return None
        messages, offset_s = decode_message(self._decoder, self._arrived[client_index].popleft())
        return [shift_times(message, offset_s) for message in messages]

    def send(self, client_index: int, message: Any) -> None:
        """Send a message to a client. A client that is not connected does not receive the message."""
        self._socket.send_multipart([self._identities[client_index], encode_message(self._encoder, message)])

    def close(self) -> None:
        """Send queued messages within LINGER_MS, and close the socket."""
        self._watch.stop()
        self._admission.stop()
        self._context.destroy(linger=LINGER_MS)

    def _read_messages(self) -> None:
        while self._socket.poll(0):
            identity, data = self._socket.recv_multipart()
            self._arrived[self._identities.index(identity)].append(data)


class _AllowedClients:
    """Admits the clients that have a given public key, in Z85."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._key


class _OrphanWatch(threading.Thread):
    """Ends the process if no client is connected.

    It runs in ZeroMQ's own thread, so it also works during a long step.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        super().__init__(daemon=True)
        self._socket = socket
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = socket.get_monitor_socket(events)
        self._stopped = False

    def stop(self) -> None:
        """Stop watching. Call this on the thread of the socket."""
        self._stopped = True
        self.join()
        self._socket.disable_monitor()
        self._monitor.close(0)

    def run(self) -> None:
        # Only one with the right key is a client. Others, such as port scanners, keep a connection for _HANDSHAKE_MS.
        connections: set[int] = set()
        has_client = False
        deadline_s = time.monotonic() + FIRST_CLIENT_S
        while not self._stopped:
            if self._monitor.poll(_WATCH_MS):
                event = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    connections.add(event["value"])
                elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:  # it does not say of which connection
                    has_client = True
                elif event["value"] in connections:
                    connections.remove(event["value"])
                    if has_client:
                        deadline_s = time.monotonic() + ORPHAN_S
                    has_client = has_client and bool(connections)
            if not connections and time.monotonic() > deadline_s:
                print("meltcore: the engine ends: its server cannot be reached", file=sys.stderr, flush=True)
                os._exit(_EXIT_ORPHANED)
