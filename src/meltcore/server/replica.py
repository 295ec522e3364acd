"""One engine process and the two sockets to it. Everything above need not know where the engine lives."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from meltcore.config import EngineConfig
from meltcore.engine.messages import EngineFailed, EngineReady, FromEngine, Shutdown, ToEngine
from meltcore.errors import ConfigError, EngineDeadError

ENGINE_COMMAND = (sys.executable, "-m", "meltcore.engine.process")
_STDERR = 2
_LEAVE_S = 3.0  # from asking the engine to leave until it is killed


class Replica:
    """Starts an engine, sends to it, and hands each of its messages to `on_message`, on the event loop."""

    def __init__(self, config: EngineConfig, command: Sequence[str], on_message: Callable[[FromEngine], None]) -> None:
        """`command` starts the engine; the folder of the sockets is added as its last argument."""
        self._config = config
        self._command = command
        self._on_message = on_message
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(FromEngine).decode
        self._outgoing: list[ToEngine] = []
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._ready: asyncio.Future[EngineReady] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def start(self) -> EngineReady:
        """Start the engine and wait until it can serve.

        Raises ConfigError with the engine's own reason where it gives one, EngineDeadError where it dies without.
        """
        loop = asyncio.get_running_loop()
        self._ready = loop.create_future()
        self._directory = Path(tempfile.mkdtemp(prefix="meltcore-"))
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = self._context.socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.set_hwm(0)  # admission bounds what is under way; a limit here would block the event loop
            socket.setsockopt(zmq.LINGER, 0)
        self._to_engine.bind(f"ipc://{self._directory}/to-engine.sock")
        self._from_engine.bind(f"ipc://{self._directory}/from-engine.sock")
        loop.add_reader(self._from_engine.FD, self._receive)
        # A session of its own: Ctrl-C in our terminal is for us, the engine still has to drain. Its standard output
        # joins our standard error, so that ours holds nothing but our own lines.
        self._process = await asyncio.create_subprocess_exec(
            *self._command, str(self._directory), stdin=asyncio.subprocess.PIPE, stdout=_STDERR,
            start_new_session=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")  # and kept open: its end is our end
        exited = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {self._ready, exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self._receive()  # what it said last may still be in the socket
        if self._ready.done():
            exited.cancel()
            return self._ready.result()
        raise EngineDeadError(f"the engine ended while loading ({_how(exited.result())})")

    async def wait(self) -> str:
        """Wait until the engine process has ended; returns how."""
        assert self._process is not None
        return _how(await self._process.wait())

    def send(self, message: ToEngine) -> None:
        """Queue a message; all of one turn of the event loop travel together."""
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outgoing.append(message)

    async def stop(self) -> None:
        """End the engine, by force where it does not leave in time, and remove the sockets. Can be called twice."""
        if self._process is not None and self._process.returncode is None:
            self.send(Shutdown())
            self._flush()
            try:
                async with asyncio.timeout(_LEAVE_S if self._is_ready else 0):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self._close()

    def kill(self) -> None:
        """End the engine process now."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def remove_files(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    @property
    def _is_ready(self) -> bool:
        return self._ready is not None and self._ready.done() and self._ready.exception() is None

    def _flush(self) -> None:
        messages, self._outgoing = self._outgoing, []
        if not messages or self._context is None:
            return
        try:
            self._to_engine.send(self._encode(messages), zmq.NOBLOCK)
        except zmq.Again:
            # No engine is connected: it is dead or not up yet. Whoever watches the process ends its requests.
            return

    def _receive(self) -> None:
        # The descriptor signals once for any number of messages, so all of them are read.
        while self._context is not None:
            try:
                data = self._from_engine.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = self._read(data)
                self._note_start(message)
                self._on_message(message)
            except Exception:
                # The loop reports it. The descriptor will not signal again for what is still in the socket.
                asyncio.get_running_loop().call_soon(self._receive)
                raise

    def _read(self, data: bytes) -> FromEngine:
        """The message in `data`. One that cannot be read ends the engine: nothing it says later can be trusted."""
        try:
            return self._decode(data)
        except msgspec.DecodeError as error:
            self.kill()
            return EngineFailed(f"the engine sent a message that the front cannot read: {error}")

    def _note_start(self, message: FromEngine) -> None:
        if self._ready is None or self._ready.done():
            return
        if isinstance(message, EngineReady):
            self._ready.set_result(message)
        elif isinstance(message, EngineFailed):
            self._ready.set_exception(ConfigError(message.message))

    def _close(self) -> None:
        if self._context is None:
            return
        asyncio.get_running_loop().remove_reader(self._from_engine.FD)
        self._to_engine.close()
        self._from_engine.close()
        self._context.term()
        self._context = None
        self.remove_files()


def _how(returncode: int) -> str:
    return f"exit status {returncode}" if returncode >= 0 else f"killed by signal {-returncode}"
