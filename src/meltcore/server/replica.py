"""One engine process: started, watched, ended. A server has one, or several that share its requests (`--dp`).

A replica that dies stays out of use: what it worked on fails at once, the others go on, and the server ends with the
last of them. It is not started again, since a fault of its GPU would only have it die over and over.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from meltcore.config import EngineConfig
from meltcore.engine.host_memory import ONE_ARENA
from meltcore.engine.messages import EngineFailed, EngineReady, FromEngine, Shutdown, ToEngine
from meltcore.errors import ConfigError, EngineDeadError
from meltcore.server.link import EngineLink

ENGINE_COMMAND = (sys.executable, "-m", "meltcore.engine")
_STDERR = 2
_LEAVE_S = 3.0  # from asking the engine to leave until it is killed
_LAST_WORD_S = 1.0  # for what an engine said before it ended to come through ZeroMQ's thread on a busy machine


class Replica:
    """Starts an engine and hands each of its messages for the first front to `on_message`, on the event loop."""

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        on_message: Callable[[FromEngine], None],
        *,
        directory: Path,
        fronts: int = 1,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`command` starts the engine; the folder of the sockets and the number of fronts are its last arguments.

        `environment` is added to ours.
        """
        self._config = config
        self._command = (*command, str(directory), str(fronts))
        self._on_message = on_message
        self._directory = directory
        self._environment = dict(environment or {})
        self._link: EngineLink | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._ready: asyncio.Future[EngineReady] | None = None

    async def start(self) -> EngineReady:
        """Start the engine and wait until it can serve.

        Raises ConfigError with the engine's own reason where it gives one, EngineDeadError where it dies without.
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._link = EngineLink(self._directory, 0, self._receive, self.fail)
        # A session of its own: Ctrl-C in our terminal is for us, the engine still has to drain. Its standard output
        # joins our standard error, so that ours holds nothing but our own lines.
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=_STDERR,
            start_new_session=True,
            env=os.environ | ONE_ARENA | self._environment,
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")  # and kept open: its end is our end
        exited = asyncio.create_task(self._process.wait())
        either: set[asyncio.Future[Any]] = {self._ready, exited}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        self._link.receive()  # what it said last may be in the socket, or on its way there
        await asyncio.wait({self._ready}, timeout=_LAST_WORD_S)
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
        assert self._link is not None
        self._link.send(message)

    async def stop(self) -> None:
        """End the engine, by force where it does not leave in time. Can be called twice."""
        if self._process is not None and self._process.returncode is None and self._link is not None:
            self._link.send(Shutdown())
            self._link.flush()
            try:
                async with asyncio.timeout(_LEAVE_S if self.loaded is not None else 0):
                    await self._process.wait()
            except TimeoutError:
                self.kill()
                await self._process.wait()
        self.close_link()

    def close_link(self) -> None:
        """Say and hear nothing any more. Can be called twice."""
        if self._link is not None:
            self._link.close()

    def kill(self) -> None:
        """End the engine process now."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def fail(self, why: str) -> None:
        """End the engine, which cannot be worked with; `why` stands for its own last words."""
        self.kill()
        self._receive(EngineFailed(why))

    @property
    def loaded(self) -> EngineReady | None:
        """What the engine said when it could serve; None until then."""
        ready = self._ready
        return ready.result() if ready is not None and ready.done() and ready.exception() is None else None

    def is_stopped(self) -> bool:
        """Whether the process is held by SIGSTOP or its like (proc(5), the third field of stat). A debugger is none of
        these: who attaches one knows what it holds up."""
        if self._process is None:
            return False
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] == "T"

    def _receive(self, message: FromEngine) -> None:
        if self._ready is not None and not self._ready.done():
            if isinstance(message, EngineReady):
                self._ready.set_result(message)
            elif isinstance(message, EngineFailed):
                self._ready.set_exception(ConfigError(message.message))
        self._on_message(message)


def _how(returncode: int) -> str:
    return f"exit status {returncode}" if returncode >= 0 else f"killed by signal {-returncode}"
