"""An API server as an engine process sees it: it binds the sockets, starts the process, and sends a test's messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import zmq
from waiting import WAIT_S

from meltcore.protocol.generation import FromEngine, GenerationReady
from meltcore.protocol.shell import Loading
from meltcore.protocol.sockets import socket_address
from meltcore.settings.config import EngineConfig

WAIT_MS = 120_000  # against hangs: a start takes seconds, and more on a busy machine
POLL_MS = 500


class EngineClient:
    """Binds the sockets and starts the process, as a server does."""

    def __init__(self, folder: Path, config: EngineConfig, *, from_engine: Any = FromEngine) -> None:
        """from_engine: the union of the engine's messages."""
        self._message_type = from_engine
        context = zmq.Context.instance()
        self.to_engine = context.socket(zmq.PUSH)
        self.from_engine = context.socket(zmq.PULL)
        self.to_engine.bind(socket_address(folder, "to-engine", 0))
        self.from_engine.bind(socket_address(folder, "from-engine", 0))
        self.process = subprocess.Popen([sys.executable, "-m", "meltcore.engine", str(folder)], stdin=subprocess.PIPE)
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config) + b"\n")
        self.process.stdin.flush()

    def send(self, *messages: object) -> None:
        self.to_engine.send(msgspec.msgpack.encode(list(messages)))

    def receive(self) -> Any:
        """The next message; fails when the process has ended."""
        waited_ms = 0
        while not self.from_engine.poll(POLL_MS):
            waited_ms += POLL_MS
            assert waited_ms < WAIT_MS, "the engine sent nothing"
            assert self.process.poll() is None or self.from_engine.poll(POLL_MS), "the engine ended without a message"
        return msgspec.msgpack.decode(self.from_engine.recv(), type=self._message_type)

    def ready(self, message_type: type[Any] = GenerationReady) -> Any:
        while isinstance(message := self.receive(), Loading):
            assert 0 <= message.fraction <= 1
        assert isinstance(message, message_type), message
        return message

    def outputs(self, count: int) -> dict[str, list[Any]]:
        """Read until `count` requests have ended."""
        seen: dict[str, list[Any]] = {}
        while sum(outputs[-1].finish_reason is not None for outputs in seen.values()) < count:
            message = self.receive()
            assert hasattr(message, "outputs"), message
            for output in message.outputs:
                seen.setdefault(output.request_id, []).append(output)
        return seen

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        self.to_engine.close(0)
        self.from_engine.close(0)
