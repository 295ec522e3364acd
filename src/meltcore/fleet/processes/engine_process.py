"""An engine process of a replica, which the supervisor starts, watches and ends. A process is started once."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError, EngineDeadError
from meltcore.common.host_memory import ONE_ARENA_ENVIRONMENT
from meltcore.common.process import STDERR, describe_exit, is_stopped, start_async, start_call
from meltcore.fleet.processes.mps import MpsDaemon
from meltcore.protocol.engines import FromEngine, ToEngine
from meltcore.protocol.shell import EngineFailed, EngineReady, Shutdown
from meltcore.serve.engines.engine_link import EngineLink
from meltcore.settings.config import EngineConfig

ENGINE_COMMAND = (sys.executable, "-m", "meltcore.engine")
EXIT_LIMIT_S = 3.0  # from asking the engine to exit until it is killed
_LAST_MESSAGE_S = 1.0  # for the last message of an engine to pass ZeroMQ's thread on a busy machine


class EngineProcess(ABC):
    """An engine process on this machine or on another one. `on_message` gets its messages to the supervisor."""

    def __init__(self, on_message: Callable[[FromEngine], None]) -> None:
        self._on_message = on_message
        self._link: EngineLink | None = None
        self._ready: asyncio.Future[EngineReady] | None = None
        self._failure_reason: str | None = None  # as the engine reported it
        self.cpus: Collection[int] = ()  # to which the process is pinned; empty: it is not

    async def prepare(self) -> None:  # noqa: B027 - most engines of this machine need nothing
        """Prepare the start so that API servers can connect to the engine. Raises MeltcoreError if this fails."""

    async def start(self) -> EngineReady:
        """Start the engine and wait until it can serve. Return its ready message.

        Raises ConfigError with the reason that the engine reports. Raises EngineDeadError if it dies without a reason.
        """
        self._ready = asyncio.get_running_loop().create_future()
        # A failure that comes after a cancelled start is never retrieved, which would print a traceback.
        self._ready.add_done_callback(lambda ready: ready.cancelled() or ready.exception())
        await self._launch()
        assert self._link is not None
        exited = asyncio.create_task(self._wait_exit())
        pending_futures: set[asyncio.Future[Any]] = {self._ready, exited}
        await asyncio.wait(pending_futures, return_when=asyncio.FIRST_COMPLETED)
        self._link.receive()  # its last message may be in the socket, or on its way there
        await asyncio.wait({self._ready}, timeout=_LAST_MESSAGE_S)
        if self._ready.done():
            exited.cancel()
            return self._ready.result()
        raise EngineDeadError(f"the engine ended while loading ({exited.result()})")

    @abstractmethod
    async def _launch(self) -> None:
        """Open the link, and start the process if it is not running."""

    @abstractmethod
    async def _wait_exit(self) -> str:
        """Wait until the process has ended. Return a text that says how it ended."""

    async def sharing_problem(self) -> str:
        """Return why the loaded engine does not share its GPU as `sharing.means` says, or "" if it does."""
        return ""

    @property
    def node(self) -> str | None:
        """The cluster node of the engine, "" before it has a node, or None for an engine on this machine."""
        return None

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The process id while the process runs, else None."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the process immediately."""

    @abstractmethod
    def is_stopped(self) -> bool:
        """Return whether the process is stopped (SIGSTOP, SIGTSTP or a debugger)."""

    async def wait(self) -> str:
        """Wait until the process has ended. Return the reason as text."""
        exit_text = await self._wait_exit()
        return f"{self._failure_reason} ({exit_text})" if self._failure_reason else exit_text

    def send(self, message: ToEngine) -> None:
        """Queue a message to the engine."""
        assert self._link is not None
        self._link.send(message)

    async def stop(self) -> None:
        """End the engine. The engine is killed if it does not exit in time. Can be called twice."""
        if self.pid is not None:
            if self._link is not None:
                self._link.send(Shutdown())
                self._link.flush()
            exited = asyncio.create_task(self._wait_exit())
            await asyncio.wait({exited}, timeout=EXIT_LIMIT_S if self.loaded is not None else 0)
            if not exited.done():
                self.kill()
            await exited
        await self.leave()

    async def leave(self) -> None:
        """Close the sockets to an engine that has ended. This method can be called twice."""
        self.close_link()

    async def wait_freed(self) -> None:  # noqa: B027 - the process of an engine of this machine has ended
        """Wait until the memory of an ended engine is free. `leave` must have been called before."""

    @property
    def is_evicted(self) -> bool:
        """Whether the cluster has ended the engine because its node ran out of memory.

        This is no fault of the engine.
        """
        return False

    def close_link(self) -> None:
        """Close the sockets to the engine. Can be called twice."""
        if self._link is not None:
            self._link.close()

    def fail(self, reason: str) -> None:
        """End an engine that cannot be used. `reason` replaces the reason that the engine gives."""
        self.kill()
        self._receive(EngineFailed(reason))

    @property
    def loaded(self) -> EngineReady | None:
        """The engine's ready message, or None before the engine can serve."""
        ready = self._ready
        return ready.result() if ready is not None and ready.done() and ready.exception() is None else None

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, EngineFailed):
            self._failure_reason = message.message
        if self._ready is not None and not self._ready.done():
            if isinstance(message, EngineReady):
                self._ready.set_result(message)
            elif isinstance(message, EngineFailed):
                self._ready.set_exception(ConfigError(message.message))
        self._on_message(message)


class LocalEngineProcess(EngineProcess):
    """Starts an engine on this machine."""

    def __init__(
        self,
        config: EngineConfig,
        command: Sequence[str],
        on_message: Callable[[FromEngine], None],
        *,
        directory: Path,
        client_count: int,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        mps: MpsDaemon | None = None,
        cpus: Collection[int] = (),
    ) -> None:
        """Prepare an engine process.

        Args:
            config: settings of the engine.
            command: command line of the engine. The `directory` and the number of clients are appended.
            on_message: receives the engine's messages to the supervisor.
            directory: folder of the sockets.
            client_count: number of clients of the engine.
            environment: variables that are added to the environment of this process.
            log: file to which the engine's output is appended. None sends the output to standard error of this process.
            mps: the daemon of which the engine is a client, named by its environment.
            cpus: numbers of the CPUs on which the engine and its ranks may run. Empty: those of this process.
        """
        super().__init__(on_message)
        self._config = config
        self._command = (*command, str(directory), str(client_count))
        self._directory = directory
        self._environment = dict(environment or {})
        self._log = log
        self._mps = mps
        self.cpus = cpus
        self._process: asyncio.subprocess.Process | None = None

    async def prepare(self) -> None:
        """Start the MPS daemon again if it has ended. Raises ConfigError if it does not start."""
        if self._mps is not None:
            await asyncio.wrap_future(start_call(self._mps.start))

    async def sharing_problem(self) -> str:
        """Return why the loaded engine is no client of MPS, or "" if it is one, or needs none."""
        if self._mps is None or self.pid is None:
            return ""
        question = partial(self._mps.client_problem, self.pid, self._config.tensor_parallel_size)
        return await asyncio.wrap_future(start_call(question))

    async def _launch(self) -> None:
        self._link = EngineLink(self._directory, 0, self._receive, self.fail)
        self._process = await self._start_process()
        assert self._process.stdin is not None
        if self.cpus:
            try:  # before the engine has its settings, so before it has threads
                os.sched_setaffinity(self._process.pid, self.cpus)
            except OSError:  # it has ended, or the server's own CPUs were changed: it runs where this process does
                self.cpus = ()
        self._process.stdin.write(msgspec.json.encode(self._config) + b"\n")  # kept open: the engine exits at its end

    async def _start_process(self) -> asyncio.subprocess.Process:
        environment = os.environ | ONE_ARENA_ENVIRONMENT | self._environment
        if self._log is None:
            return await start_async(self._command, stdin=subprocess.PIPE, stdout=STDERR, environment=environment)
        try:
            with self._log.open("ab") as log:
                environment["PYTHONUNBUFFERED"] = "1"  # what it prints is in the file before it is killed
                return await start_async(
                    self._command, stdin=subprocess.PIPE, stdout=log, stderr=log, environment=environment
                )
        except OSError as error:
            raise ConfigError(f"the log {self._log} cannot be written: {error.strerror}") from error

    async def _wait_exit(self) -> str:
        assert self._process is not None
        return describe_exit(await self._process.wait())

    @property
    def pid(self) -> int | None:
        """The process id while the process runs, else None."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    def kill(self) -> None:
        """Kill the process immediately."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()

    def is_stopped(self) -> bool:
        """Return whether the process is stopped (SIGSTOP, SIGTSTP or a debugger)."""
        return self._process is not None and is_stopped(self._process.pid)


def common_limits(engines: Sequence[EngineReady]) -> EngineReady:
    """Return one ready message for all replicas of a model. Each limit is the smallest limit of any replica.

    The memory table is the table of the first replica.
    """
    lowest = {name: min(getattr(engine, name) for engine in engines) for name in engines[0].LOWEST}
    return msgspec.structs.replace(engines[0], load_s=max(engine.load_s for engine in engines), **lowest)
