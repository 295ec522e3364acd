"""Starts the driver process of a cluster for the supervisor.

The driver starts engines on nodes and reports their ends.
"""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from meltcore.common.errors import ConfigError, EngineDeadError, EngineEvictedError, EnginePendingError, MeltcoreError
from meltcore.common.process import STDERR, describe_exit, end_async, start_async, start_call
from meltcore.fleet.plan.cluster import left_out_text
from meltcore.fleet.plan.first_fit import Place
from meltcore.models.checkpoints.checkpoint import is_on_hub
from meltcore.protocol.cluster import (
    DRIVER_MODULE,
    ClusterFailed,
    ClusterNode,
    ClusterState,
    CommandEnded,
    CommandStarted,
    EngineEnded,
    EngineListening,
    EngineOutput,
    FromDriver,
    KillEngine,
    Nodes,
    Ping,
    Pong,
    ReadNodes,
    StartEngine,
    ToDriver,
)
from meltcore.protocol.tcp import EngineAddress, KeyPair

if TYPE_CHECKING:
    from meltcore.fleet.plan.planned import FleetPlanner

_CONNECT_LIMIT_S = 180.0
_EXIT_LIMIT_S = 15.0  # for the driver to end its actors
_LINE_BYTES = 2**24
_PROBE_LIMIT_S = 30.0  # for a node to answer: engines of a lost one wait for it
_PING_S, _MAX_UNANSWERED = 2.0, 5  # pings; after five without an answer the driver is ended, and started again
_START_LIMIT_S = 180.0  # for the driver to start an engine, with all its own limits
_FIRST_RETRY_S, _MAX_RETRY_S = 1.0, 15.0  # between two tries to have the cluster again


class RunEnded(NamedTuple):
    """Says how an engine process has ended.

    `is_evicted` is True if the cluster has ended the process because its node ran out of memory.
    """

    reason: str
    is_evicted: bool = False


class RemoteRun(NamedTuple):
    """Describes an engine process on a node: its address, its process id on the node, and how it has ended."""

    address: EngineAddress
    pid: int
    ended: asyncio.Future[RunEnded]


class ClusterDriver:
    """Runs the driver process of one fleet.

    If the process ends, it is started again, and engines continue meanwhile.
    """

    def __init__(self, address: str, planner: FleetPlanner, report: Callable[[str], None]) -> None:
        """Create the driver of a fleet.

        `report` gets a line when the cluster can no longer be changed, and when it can be changed again.
        """
        self._planner = planner
        self._address = address
        self._report = report
        self.name = secrets.token_hex(8)  # of the fleet, on its nodes
        self.keys = KeyPair.generate()  # of the clients of its engines
        self.problem = ""  # why the cluster cannot be changed; "": it can
        self._process: asyncio.subprocess.Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._pinging: asyncio.Task[None] | None = None
        self._has_answered = False  # since the last ping
        self._retrying: asyncio.Task[None] | None = None
        self._connected: asyncio.Future[None] | None = None
        self._nodes: asyncio.Future[list[ClusterNode]] | None = None  # of a question after the first
        self._left_out: set[str] = set()  # nodes with a problem
        self._node_names = planner.node_names  # by node id; another driver calls them the same
        self._checkpoints: set[str] = set()  # of engines that may be started elsewhere
        self._asked: list[str] = []  # of these, in the last question
        self._running: dict[int, StartEngine] = {}
        self._starts: dict[int, tuple[StartEngine, asyncio.Future[RemoteRun]]] = {}
        self._ended: dict[int, asyncio.Future[RunEnded]] = {}
        self._outputs: dict[int, Callable[[bytes], None]] = {}
        self._lock = asyncio.Lock()

    async def connect(self) -> None:
        """Start the driver process if it does not run, and wait until it is connected to the cluster.

        Raises ConfigError if the cluster cannot be reached, or if it could not be reached before and is tried again
        already.
        """
        async with self._lock:
            if self._process is not None and self._process.returncode is None:
                if self.problem:
                    raise ConfigError(self.problem)
                return
            await self._end_process()
            self._process = await start_async(
                [sys.executable, "-m", DRIVER_MODULE, self._address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=STDERR,
            )
            self._connected = asyncio.get_running_loop().create_future()
            self._connected.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._reading = asyncio.create_task(self._read(self._process))
            # All names stay at first: the plan has engines there that are still to be started.
            known = sorted(set(self._node_names.values()))
            self._send(ReadNodes([], _PROBE_LIMIT_S, self._node_names, known))
            try:
                async with asyncio.timeout(_CONNECT_LIMIT_S):
                    await asyncio.shield(self._connected)
            except (TimeoutError, ConfigError) as error:
                self.problem = str(error) or (
                    f"--ray {self._address}: the cluster gave no answer within {_CONNECT_LIMIT_S:g} s"
                )
                await self._end_process()
                raise ConfigError(self.problem) from None
            self._pinging = asyncio.create_task(self._ping(self._process))
            self._set_problem("")

    async def _ping(self, process: asyncio.subprocess.Process) -> None:
        """Kill a driver process that does not answer, so that it is started again."""
        unanswered = 0  # counted, and not timed: this process may have been stopped itself
        while unanswered < _MAX_UNANSWERED:
            self._has_answered = False
            self._send(Ping())
            await asyncio.sleep(_PING_S)
            unanswered = 0 if self._has_answered else unanswered + 1
        silent_s = _PING_S * _MAX_UNANSWERED
        self._set_problem(self.problem or f"--ray {self._address}: its driver has not answered for {silent_s:g} s")
        await end_async(process, 0.0)  # which `_read` notices

    async def _retry(self) -> None:
        """Start the driver process again, until it is connected to the cluster."""
        pause_s = _FIRST_RETRY_S
        while self.problem:
            await asyncio.sleep(pause_s)
            pause_s = min(_MAX_RETRY_S, 2 * pause_s)
            with suppress(ConfigError):
                await self.connect()

    async def start_engine(
        self,
        start: StartEngine,
        on_output: Callable[[bytes], None],
        on_place: Callable[[str, Sequence[int]], None],
        exits_by_failed_node: Mapping[str, int],
    ) -> RemoteRun:
        """Start an engine process on a node.

        Raises EnginePendingError if nothing was started, because no node has memory or the cluster cannot be changed.
        Raises EngineEvictedError if the cluster has ended the start, and EngineDeadError if the engine does not run.

        Args:
            start: the message that describes the engine.
            on_output: receives the standard output and standard error of the engine.
            on_place: receives the node on which the engine is started, and the numbers of its GPUs.
            exits_by_failed_node: number of the engine's exits by node. The engine is not started on these nodes while
                another node has
                memory.
        """
        self._outputs[start.engine] = on_output
        try:
            if start.node in exits_by_failed_node:
                reason = f"it has died {exits_by_failed_node[start.node]} times on {start.node}"
                try:
                    return await self._start_elsewhere(start, reason, on_place, exits_by_failed_node)
                except EngineEvictedError:
                    raise
                except EnginePendingError as error:
                    self._report(f"{start.model}: {error}: it is started there again")
                    on_place(start.node, start.gpus)
            try:
                return await self._start_on_node(start)
            except EngineEvictedError:  # its process may go on: another beside it would take more of the memory
                raise
            except EnginePendingError as error:
                return await self._start_elsewhere(start, str(error), on_place, exits_by_failed_node)
        except MeltcoreError as error:
            if isinstance(error, EnginePendingError):  # it is tried again from there
                on_place(start.node, start.gpus)
            self._outputs.pop(start.engine, None)
            raise

    @property
    def _unchangeable(self) -> str:
        return f"the cluster cannot be changed: {self.problem}"

    async def _start_elsewhere(
        self,
        start: StartEngine,
        reason: str,
        on_place: Callable[[str, Sequence[int]], None],
        exits_by_failed_node: Mapping[str, int],
    ) -> RemoteRun:
        """Start the same engine on another node that has memory now.

        Raises EnginePendingError if no node has memory.
        """
        moved = await self._elsewhere(start, reason, exits_by_failed_node)
        on_place(moved.node, moved.gpus)
        return await self._start_on_node(moved)

    async def _elsewhere(self, start: StartEngine, reason: str, exits_by_failed_node: Mapping[str, int]) -> StartEngine:
        """Return the message that starts the same engine on another node with free memory.

        Raises EnginePendingError if no node has memory.
        """
        if self.problem:
            raise EnginePendingError(reason)
        # A hub id of random weights may not be on the hub: their `shapes` are here.
        model, is_random = start.config.model, start.config.load_format == "dummy"
        must_load = model.startswith("/") or (is_on_hub(model) and not is_random)
        try:
            nodes = await self.read_nodes([model] if must_load else [])
        except ConfigError as error:
            raise EnginePendingError(f"{reason}, and {error}") from error
        await asyncio.wrap_future(
            start_call(self._planner.read_sizes)
        )  # a child process builds the models: 3 s and more
        # Many engines may have lost their node with it. What is given to one is not free for the next, loaded or not.
        place = self._planner.elsewhere(start, nodes, self.places(), exits_by_failed_node)
        if place is None and start.node not in exits_by_failed_node:  # one that may fail is better than none
            place = self._planner.elsewhere(start, nodes, self.places())
        if place is None:
            left_out = left_out_text(nodes)
            why = f"{reason}, and {self._planner.why_nowhere(start)}"
            raise EnginePendingError(why + (left_out and f"; {left_out}"))
        self._report(f"{reason}: its engine of {start.model} is started on {place.node}")
        return msgspec.structs.replace(start, node=place.node, gpus=list(place.gpus))

    def places(self) -> dict[tuple[str, int], Place]:
        """Return the places where engines run or are being started, by model and replica."""
        running = self._running.values()
        return {(start.model, start.replica): Place(start.node, tuple(start.gpus)) for start in running}

    @property
    def _used_nodes(self) -> list[str]:
        return sorted({start.node for start in self._running.values()})

    async def read_nodes(self, checkpoints: Iterable[str]) -> list[ClusterNode]:
        """Return all living nodes, each with the checkpoints that it cannot load.

        Raises ConfigError if the cluster cannot be read now.
        """
        if self.problem:
            raise ConfigError(self._unchangeable)
        wanted = set(checkpoints)
        self._checkpoints |= wanted
        if self._nodes is not None and not wanted.issubset(self._asked):  # that of now has not named them
            await asyncio.wait({self._nodes}, timeout=_CONNECT_LIMIT_S)
        return await self._read_nodes()

    async def _read_nodes(self) -> list[ClusterNode]:
        """Return all living nodes. Concurrent callers get the same answer.

        Raises ConfigError if the cluster cannot be read.
        """
        if self._nodes is None or self._nodes.done():
            self._nodes = asyncio.get_running_loop().create_future()
            self._nodes.add_done_callback(lambda future: future.cancelled() or future.exception())
            self._asked = sorted(self._checkpoints)
            self._send(ReadNodes(self._asked, _PROBE_LIMIT_S, used=self._used_nodes))
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                return self._without_own(await asyncio.shield(self._nodes))
        except (TimeoutError, ConfigError) as error:
            why = str(error) or f"they gave no answer within {_CONNECT_LIMIT_S:g} s"
            raise ConfigError(f"the nodes cannot be read: {why}") from error

    def _without_own(self, nodes: Sequence[ClusterNode]) -> list[ClusterNode]:
        """Return the nodes without the memory that Ray has given to this fleet in their reserved memory."""
        own: defaultdict[tuple[str, int], float] = defaultdict(float)
        for start in self._running.values():
            for number in start.gpus:
                own[start.node, number] += start.gib
        return [
            msgspec.structs.replace(
                node,
                reserved_gib={
                    number: max(0.0, size - own[node.name, number]) for number, size in node.reserved_gib.items()
                },
            )
            for node in nodes
        ]

    async def _start_on_node(self, start: StartEngine) -> RemoteRun:
        if self.problem:
            raise EnginePendingError(self._unchangeable)
        if start.node in self._left_out:
            raise EnginePendingError(f"the node {start.node} is left out")
        future: asyncio.Future[RemoteRun] = asyncio.get_running_loop().create_future()
        self._starts[start.engine] = (start, future)
        self._running[start.engine] = start
        self._send(start)
        try:
            async with asyncio.timeout(_START_LIMIT_S):
                run = await future
        except TimeoutError:
            self.kill_engine(start.engine)
            self._forget(start.engine)
            raise EnginePendingError(f"{start.node} has not started it within {_START_LIMIT_S:g} s") from None
        except asyncio.CancelledError:
            self.kill_engine(start.engine)
            self._forget(start.engine)
            raise
        except MeltcoreError:
            self._forget(start.engine)
            raise
        finally:
            self._starts.pop(start.engine, None)
        run.ended.add_done_callback(lambda _ended: self._forget(start.engine))
        return run

    def _forget(self, engine: int) -> None:
        self._running.pop(engine, None)

    def kill_engine(self, engine: int) -> None:
        """Kill an engine process immediately.

        Without a driver process the engine ends when no process is connected to it any more.
        """
        self._send(KillEngine(engine))

    async def stop(self) -> None:
        """End the driver process, and with it all engines that it has started."""
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.gather(self._retrying, return_exceptions=True)
        await self._end_process()

    async def _end_process(self) -> None:
        if self._process is None:
            return
        assert self._process.stdin is not None
        assert self._reading is not None
        self._reading.cancel()
        if self._pinging is not None:
            self._pinging.cancel()
        self._process.stdin.close()
        await end_async(self._process, _EXIT_LIMIT_S)
        self._process = None

    def _send(self, message: ToDriver) -> None:
        if self._process is not None and self._process.stdin is not None:
            with suppress(ConnectionError, RuntimeError):  # it has ended, which the reader reports
                self._process.stdin.write(msgspec.json.encode(message) + b"\n")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        decode = msgspec.json.Decoder(FromDriver).decode
        buffer = b""
        while block := await process.stdout.read(_LINE_BYTES):
            *lines, buffer = (buffer + block).split(b"\n")
            for line in lines:
                self._on_line(decode(line))
        self._lose(f"its driver has ended ({describe_exit(await process.wait())})")

    def _on_line(self, message: FromDriver) -> None:
        self._has_answered = True
        if isinstance(message, EngineListening):
            if (entry := self._starts.get(message.engine)) is not None and not entry[1].done():
                ended = self._ended[message.engine] = asyncio.get_running_loop().create_future()
                listening = message.listening
                address = EngineAddress(entry[0].node, message.host, listening.port, listening.engine_key, self.keys)
                entry[1].set_result(RemoteRun(address, message.pid, ended))
        elif isinstance(message, EngineOutput):
            if (on_output := self._outputs.get(message.engine)) is not None:
                on_output(message.data)
        elif isinstance(message, ClusterState):
            self._set_problem(message.problem and f"--ray {self._address}: {message.problem}")
        elif isinstance(message, EngineEnded):
            run = self._ended.pop(message.engine, None)
            if not message.no_room or run is not None:  # else it may be started elsewhere
                self._outputs.pop(message.engine, None)
            if run is not None and not run.done():
                run.set_result(RunEnded(message.reason, is_evicted=message.is_evicted))
            elif (entry := self._starts.get(message.engine)) is not None and not entry[1].done():
                error = EngineEvictedError if message.is_evicted else EngineDeadError
                entry[1].set_exception((EnginePendingError if message.no_room else error)(message.reason))
        elif not isinstance(message, Pong):
            self._on_nodes(message)

    def _on_nodes(self, message: Nodes | ClusterFailed | CommandStarted | CommandEnded) -> None:
        if isinstance(message, Nodes):
            self._node_names |= {node.node_id: node.name for node in message.nodes}
            self._note_left_out(message.nodes)
        if self._nodes is not None and not self._nodes.done():
            if isinstance(message, ClusterFailed):
                self._nodes.set_exception(ConfigError(message.message))
            elif isinstance(message, Nodes):
                self._nodes.set_result(message.nodes)
        elif self._connected is not None and not self._connected.done():
            if isinstance(message, ClusterFailed):
                self._connected.set_exception(ConfigError(message.message))
            elif isinstance(message, Nodes):
                self._connected.set_result(None)

    def _note_left_out(self, nodes: Sequence[ClusterNode]) -> None:
        """Report nodes that can no longer be used, and nodes that can be used again."""
        before, self._left_out = self._left_out, {node.name for node in nodes if node.problem}
        if new := left_out_text(node for node in nodes if node.name not in before):
            self._report(new)
        for name in sorted(before.intersection(node.name for node in nodes) - self._left_out):
            self._report(f"node {name} can be used again")

    def _lose(self, reason: str) -> None:
        """Fail the requests to the driver process that are open, and connect to the cluster again.

        Engines that can be reached continue.
        """
        error = f"--ray {self._address}: {reason}"
        if self._connected is not None and not self._connected.done():  # the caller tries again, or gives up
            self._connected.set_exception(ConfigError(error))
            return
        self._set_problem(self.problem or error)
        if self._nodes is not None and not self._nodes.done():
            self._nodes.set_exception(ConfigError(self.problem))
        self._ended.clear()
        if self._retrying is None or self._retrying.done():
            self._retrying = asyncio.create_task(self._retry())

    def _set_problem(self, problem: str) -> None:
        """Store why the cluster cannot be changed now. Engines do not start while there is a problem."""
        before, self.problem = self.problem, problem
        if problem:
            for number, (_, future) in self._starts.items():
                if not future.done():
                    self.kill_engine(number)
                    future.set_exception(EnginePendingError(self._unchangeable))
        if problem and not before:
            self._report(f"{self._unchangeable}; its engines go on")
        elif before and not problem:
            self._report("the cluster can be changed again")
