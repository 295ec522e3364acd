"""Runs an engine process on another node. The cluster starts the process, and this server reaches it over TCP."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from meltcore.common.errors import EngineEvictedError
from meltcore.fleet.processes.engine_process import EXIT_LIMIT_S, EngineProcess
from meltcore.fleet.ray.cluster_driver import ClusterDriver, RemoteRun, RunEnded
from meltcore.protocol.cluster import StartEngine
from meltcore.protocol.engines import FromEngine
from meltcore.protocol.shell import Shutdown
from meltcore.protocol.tcp import FIRST_CLIENT_S, ORPHAN_S, write_address
from meltcore.serve.engines.engine_link import EngineLink

_REASON_S = 0.5  # for the cluster to tell why an engine has ended whose connection is lost
_POLL_S = 0.02
_FREED_POLL_S, _CONNECT_S = 0.25, 1.0  # the port of an engine that was left is tried so often, and has so long
_KILL_S = 1.0  # for the cluster to tell that a killed engine has ended; its node may be gone


class RemoteEngineProcess(EngineProcess):
    """Starts an engine on a node. Each of the engine's messages to the supervisor is passed to `on_message`.

    The process counts as ended when the cluster says so, or when the connection to it is lost. In the second case the
    node ends the process, or the process exits when it notices that no client is connected.
    """

    def __init__(
        self,
        cluster: ClusterDriver,
        start: StartEngine,
        on_message: Callable[[FromEngine], None],
        directory: Path,
        log: Path | None = None,
        *,
        on_place: Callable[[str, Sequence[int]], None] = lambda _node, _gpus: None,
        exits_by_failed_node: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Prepare an engine process.

        Args:
            cluster: starts the process.
            start: the engine.
            on_message: receives the engine's messages to the supervisor.
            directory: folder into which the engine's address is written, for all clients.
            log: file to which the engine's output is appended. None sends the output to standard error of this process.
            on_place: see `ClusterDriver.start_engine`.
            exits_by_failed_node: see `ClusterDriver.start_engine`.
        """
        super().__init__(on_message)
        self._cluster = cluster
        self._start = start
        self._directory = directory
        self._log = log
        self._on_place, self._exits_by_failed_node = on_place, exits_by_failed_node
        self._run: RemoteRun | None = None
        self._is_left = False
        self._orphaned_s: float | None = None  # when it has ended by itself at the latest (monotonic), once it is left
        self._unseen_s = 0.0  # when one whose address is not known has ended by itself, where its start was evicted

    async def prepare(self) -> None:
        """Start the process.

        Raises EngineDeadError if it fails, and EnginePendingError if no process can be started now.
        """
        self._on_output(b"")  # its log exists from the start, also of an engine that prints nothing
        try:
            run = await self._cluster.start_engine(
                self._start, self._on_output, self._on_place, self._exits_by_failed_node
            )
        except EngineEvictedError:
            self._unseen_s = time.monotonic() + FIRST_CLIENT_S
            raise
        self._run = run
        write_address(self._directory, self._run.address)

    async def _launch(self) -> None:
        self._link = EngineLink(self._directory, 0, self._receive, self.fail, self._on_lost)

    async def _wait_exit(self) -> str:
        assert self._run is not None
        return (await asyncio.shield(self._run.ended)).reason

    async def leave(self) -> None:
        """Close the connection. If the engine still runs, because only its Ray actor has died, first tell it to exit.

        From now on an engine that has not exited counts as an orphan.
        """
        if self._is_left:
            return
        self._is_left = True
        try:
            if self._link is not None and self._link.is_connected:
                self._link.send(Shutdown())
                self._link.flush()
                with suppress(TimeoutError):
                    async with asyncio.timeout(EXIT_LIMIT_S):
                        while self._link.is_connected:  # noqa: ASYNC110 - it has no event
                            await asyncio.sleep(_POLL_S)
        finally:
            self.close_link()
            self._orphaned_s = time.monotonic() + ORPHAN_S  # also where this was cancelled

    async def wait_freed(self) -> None:
        """Wait until an engine has closed its port after `leave`, or until its time as an orphan is over.

        A lost connection does not show whether the process has ended, because the process may hang or the network may
        have failed. An engine whose start was evicted ends by itself, because no client has connected to it.
        """
        if self._run is None:
            await asyncio.sleep(self._unseen_s - time.monotonic())
            return
        address = self._run.address
        while self._orphaned_s is not None and (left_s := self._orphaned_s - time.monotonic()) > 0:
            if await _is_closed(address.host, address.port, min(left_s, _CONNECT_S)):
                return
            await asyncio.sleep(_FREED_POLL_S)

    @property
    def is_evicted(self) -> bool:
        """Whether the cluster has ended the engine because its node ran out of memory.

        This is no fault of the engine.
        """
        return self._run is not None and self._run.ended.done() and self._run.ended.result().is_evicted

    def _receive(self, message: FromEngine) -> None:
        if not self._is_left:
            super()._receive(message)

    @property
    def node(self) -> str | None:
        """The name of the engine's node while the engine runs, else ""."""
        return self._run.address.name if self._run is not None and not self._run.ended.done() else ""

    @property
    def pid(self) -> int | None:
        """The process id on the engine's node while the engine runs, else None."""
        return self._run.pid if self._run is not None and not self._run.ended.done() else None

    def kill(self) -> None:
        """Kill the process now, if its node can be reached."""
        if self._run is not None and not self._run.ended.done():
            self._cluster.kill_engine(self._start.engine)
            asyncio.get_running_loop().call_later(_KILL_S, self._give_up)

    def is_stopped(self) -> bool:
        """Return False, because a stopped process loses its connection and counts as ended."""
        return False

    def _on_output(self, data: bytes) -> None:
        if self._log is None:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            return
        with suppress(OSError), self._log.open("ab") as log:  # without its log, as on a full disk, the engine serves
            log.write(data)

    def _give_up(self) -> None:
        if self._run is not None and not self._run.ended.done():
            self._run.ended.set_result(RunEnded("its node does not answer"))

    def _on_lost(self, reason: str) -> None:
        asyncio.get_running_loop().call_later(_REASON_S, self._lose, reason)

    def _lose(self, reason: str) -> None:
        if self._run is not None and not self._run.ended.done():
            self._run.ended.set_result(RunEnded(reason))
            self._cluster.kill_engine(self._start.engine)


async def _is_closed(host: str, port: int, limit_s: float) -> bool:
    """Return whether a node refuses connections to a port, which means that no process listens there any more."""
    try:
        async with asyncio.timeout(limit_s):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):  # of a node that cannot be reached
        return False
    writer.close()
    return False
