"""Defines how clients reach an engine on another machine: one TCP port per engine, encrypted with CURVE keys.

The engine binds a ROUTER socket, and each client (the supervisor, with index 0, and the API servers) connects a DEALER
socket to it. A file in the folder of the sockets says that the other end is on another machine. Each engine process
makes a key pair, and the supervisor makes one for all clients. Secret keys stay on the machine that made them.

A monotonic clock belongs to one machine. So every message begins with the sender's clock, and the receiver shifts the
times in the message by the difference to its own clock. Durations before the send are kept. The duration of the
transport is lost.
"""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

ORPHAN_S = 10.0  # without any connection, an engine on another machine ends: its server is gone or cannot reach it
# As long, an engine waits for its first client. It listens before it loads, and the supervisor gives up after 10 s; the
# rest is for the cluster to tell where it listens.
FIRST_CLIENT_S = 15.0
CLOCK = struct.Struct("<d")  # time.monotonic() of the sender, before each message
CLOCK_BYTES = CLOCK.size
# ZeroMQ asks for a sign of life this often, and takes a connection without one for lost. Open requests of an engine
# that cannot be reached end within 5 s.
HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 500, 3000
_BINDING, _LISTENING, _ADDRESS = "binding.json", "listening.json", "address.json"


class KeyPair(msgspec.Struct, frozen=True):
    """A CURVE key pair, in Z85."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> Self:
        """Make a key pair."""
        import zmq  # `meltcore plan` has no sockets

        return cls(*(key.decode() for key in zmq.curve_keypair()))


class Binding(msgspec.Struct, frozen=True):
    """Tells an engine how to listen: the host name or address to bind, and the public key of its clients."""

    host: str
    client_key: str


class Listening(msgspec.Struct, frozen=True):
    """Reports the port that an engine has bound, and the engine's public key."""

    port: int
    engine_key: str


class EngineAddress(msgspec.Struct, frozen=True):
    """The address of an engine, its public key, and the key pair of its clients.

    `name` is the name of the engine's node in messages.
    """

    name: str
    host: str
    port: int
    engine_key: str
    client_keys: KeyPair

    @property
    def url(self) -> str:
        """The address as a ZeroMQ endpoint."""
        return f"tcp://[{self.host}]:{self.port}" if ":" in self.host else f"tcp://{self.host}:{self.port}"


def write_binding(directory: Path, binding: Binding) -> None:
    """Write a file that tells the engine of `directory` to listen on TCP. Only this user may enter the folder."""
    (directory / _BINDING).write_bytes(msgspec.json.encode(binding))


def read_binding(directory: Path) -> Binding | None:
    """Return the `Binding` in the file of `write_binding`, and remove the file.

    Returns None for an engine whose clients are on this machine.
    """
    path = directory / _BINDING
    if not path.exists():
        return None
    binding = msgspec.json.decode(path.read_bytes(), type=Binding)
    path.unlink()
    return binding


def write_listening(directory: Path, listening: Listening) -> None:
    """Write a file with the port of the engine, for the process that started the engine."""
    part = directory / f"{_LISTENING}.part"
    part.write_bytes(msgspec.json.encode(listening))
    part.rename(directory / _LISTENING)


def read_listening(directory: Path) -> Listening | None:
    """Return the `Listening` in the file of `write_listening`, or None before the engine listens."""
    path = directory / _LISTENING
    return msgspec.json.decode(path.read_bytes(), type=Listening) if path.exists() else None


def write_address(directory: Path, address: EngineAddress) -> None:
    """Write a file that tells clients of `directory` that their engine is on another machine."""
    (directory / _ADDRESS).write_bytes(msgspec.json.encode(address))


def read_address(directory: Path) -> EngineAddress | None:
    """Return the address in the file of `write_address`, or None for an engine on this machine."""
    path = directory / _ADDRESS
    return msgspec.json.decode(path.read_bytes(), type=EngineAddress) if path.exists() else None


def is_remote(directory: Path) -> bool:
    """Return whether the engine of `directory` has to listen on TCP."""
    return (directory / _BINDING).exists()


def client_identity(client_index: int) -> bytes:
    """Return the ZeroMQ identity of a client."""
    return struct.pack("<cH", b"c", client_index)


def set_heartbeats(socket: Any) -> None:
    """Let a ZeroMQ socket detect lost connections, also a full one on which no heartbeat can be sent."""
    socket.heartbeat_ivl = HEARTBEAT_MS
    socket.tcp_maxrt = HEARTBEAT_TIMEOUT_MS  # what the peer has not acknowledged by then
    socket.heartbeat_timeout = socket.heartbeat_ttl = HEARTBEAT_TIMEOUT_MS


# --- messages ------------------------------------------------------------------------------------------------------

_Message = TypeVar("_Message")
_TIMES = ("arrived_s", "deadline_s", "step_ended_s", "started_s", "scheduled_s", "first_token_s", "finished_s")


def encode_message(encoder: msgspec.msgpack.Encoder, message: Any) -> bytearray:
    """Return the bytes of a message. The time.monotonic() of this machine comes first."""
    data = bytearray(CLOCK_BYTES)
    encoder.encode_into(message, data, CLOCK_BYTES)
    CLOCK.pack_into(data, 0, time.monotonic())
    return data


def decode_message(decoder: msgspec.msgpack.Decoder[_Message], data: bytes) -> tuple[_Message, float]:
    """Return a message, and the seconds that convert its times to the clock of this machine when added.

    Raises msgspec.DecodeError.
    """
    if len(data) < CLOCK_BYTES:
        raise msgspec.DecodeError(f"a message of {len(data)} bytes has no clock")
    return decoder.decode(memoryview(data)[CLOCK_BYTES:]), time.monotonic() - CLOCK.unpack_from(data)[0]


def shift_times(message: _Message, offset_s: float) -> _Message:
    """Return a message in which `offset_s` is added to all times. A time of 0 or None is unset and not changed."""
    if not isinstance(message, msgspec.Struct):
        return message
    changes: dict[str, Any] = {}
    for name in message.__struct_fields__:
        value = getattr(message, name)
        if name in _TIMES:
            if value:
                changes[name] = value + offset_s
        elif name == "times" and value is not None:
            changes[name] = shift_times(value, offset_s)
        elif name == "outputs" and any(output.times is not None for output in value):
            changes[name] = [output if output.times is None else shift_times(output, offset_s) for output in value]
    return msgspec.structs.replace(message, **changes) if changes else message
