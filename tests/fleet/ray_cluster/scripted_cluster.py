"""A cluster without Ray whose nodes a test changes: answers the lines of `protocol/cluster.py` from a file.

`python -m scripted_cluster STATE.json` is the driver. Engines are processes of this machine that listen on TCP. Those
of a node end when it is taken out of the file. Lines to and from the driver are kept in the file `lines` beside it.
`python scripted_cluster.py FLEET.yaml STATE.json POLICY ENGINE...` is the server, and
`python scripted_cluster.py LOG up` that of `up --daemon`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

import meltcore.fleet.plan.cluster
import meltcore.fleet.processes.remote_engine
import meltcore.fleet.ray.cluster_driver
import meltcore.fleet.run.served_model
import meltcore.fleet.run.supervised_model
from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.process import describe_exit, end_async, start_async
from meltcore.fleet.daemon import fleet_options, serve_recorded
from meltcore.fleet.daemon import main as serve_in_background
from meltcore.fleet.plan.cluster import cluster_reader
from meltcore.fleet.plan.planned import FleetPlanner
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.fleet.supervisor import Supervisor
from meltcore.protocol.cluster import (
    ClusterFailed,
    ClusterNode,
    ClusterState,
    EngineEnded,
    EngineListening,
    FromDriver,
    KillEngine,
    Nodes,
    Ping,
    Pong,
    ReadNodes,
    StartEngine,
    ToDriver,
)
from meltcore.protocol.tcp import Binding, read_listening, write_binding

GIB = 2**30
HOST = "127.0.0.1"
LINES = "lines"
ROOM_POLL_S = RETRY_S = 0.1
PING_S = 0.4
ORPHAN_S = 4.0  # as scripted_engine.py has it
_POLL_S = 0.02


class Node(msgspec.Struct):
    """A node of the state: its name, and GiB of each GPU and of its host. is_full: other Ray jobs have its GPUs,
    since its memory was read.

    is_faulty: its engines die. used_gib: of each GPU, by others and the driver; reserved_gib: by other Ray jobs, that
    NVML does not show. missing: why it cannot load a checkpoint. problem: why it cannot be used. actor_deaths: at each
    more its actors die, and leave their engines; evictions: those by Ray's memory monitor. evicts_starts: it ends those
    that start an engine.
    """

    name: str
    gib: list[int] = []
    host_gib: float = 4.0
    is_full: bool = False
    is_faulty: bool = False
    used_gib: float = 0.5
    reserved_gib: float = 0.0
    missing: dict[str, str] = {}
    problem: str = ""
    actor_deaths: int = 0
    evictions: int = 0
    evicts_starts: bool = False


class State(msgspec.Struct):
    """The state of the cluster. problem: the head node is silent; refuses: a new driver does not get the cluster."""

    nodes: dict[str, Node]
    problem: str = ""
    refuses: bool = False


class ScriptedCluster:
    """The state as a test has it; written at the end of each `change`."""

    def __init__(self, folder: Path, **nodes: Node) -> None:
        self.path = folder / "cluster.json"
        self.state = State(nodes)
        self._write()

    def _write(self) -> None:
        part = self.path.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self.state))
        part.rename(self.path)

    @contextmanager
    def change(self) -> Iterator[State]:
        yield self.state
        self._write()

    def command(self, fleet: Path, policy: RestartAfterPause, engine: Sequence[str]) -> list[str]:
        """The command of a server on this cluster."""
        return [sys.executable, __file__, str(fleet), str(self.path), msgspec.json.encode(policy).decode(), *engine]


class Driver:
    """Follows the file, and starts, watches and ends engine processes."""

    def __init__(self, path: Path, folder: Path) -> None:
        self._path, self._folder = path, folder
        self.state = self.read()
        self._engines: dict[int, tuple[StartEngine, asyncio.subprocess.Process]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self) -> State:
        return msgspec.json.decode(self._path.read_bytes(), type=State)

    async def run(self) -> None:
        following = asyncio.create_task(self._follow())
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            message = msgspec.json.decode(line, type=ToDriver)
            note(line)
            self.state = self.read()
            if isinstance(message, Ping):
                answer(Pong())
            elif isinstance(message, ReadNodes):
                answer(Nodes([self._node(key, node) for key, node in self.state.nodes.items()]))
            elif isinstance(message, StartEngine):
                task = asyncio.create_task(self._keep_engine(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(message, KillEngine) and message.engine in self._engines:
                await end_async(self._engines[message.engine][1], 0.0)
        following.cancel()
        for _, process in self._engines.values():
            await end_async(process, 0.0)

    async def _follow(self) -> None:
        after = self.state
        while True:
            await asyncio.sleep(_POLL_S)
            before = after  # not self.state: whatever came in since then has read the file again
            after = self.state = self.read()
            if before.problem != self.state.problem:
                answer(ClusterState(self.state.problem))
            for start, process in list(self._engines.values()):
                node = self.state.nodes.get(start.node)
                if node is None or node.is_faulty:
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                elif (last := before.nodes.get(start.node)) is not None and node.actor_deaths > last.actor_deaths:
                    del self._engines[start.engine]
                    is_evicted = node.evictions > last.evictions
                    reason = "its memory is low" if is_evicted else "its actor has died"
                    answer(EngineEnded(start.engine, f"node {start.node}: {reason}", is_evicted=is_evicted))

    def _node(self, key: str, node: Node) -> ClusterNode:
        if node.problem:
            return ClusterNode(node.name, key, HOST, Machine((), "", 0), problem=node.problem)
        cards, reserved = [], {}
        for number, size in enumerate(node.gib):
            used = sum(start.gib for start, _ in self._engines.values() if start.node == key and number in start.gpus)
            reserved[number] = node.reserved_gib + used
            cards.append(VisibleGpu(number, "NVIDIA Scripted", size * GIB, round((node.used_gib + used) * GIB)))
        machine = Machine(tuple(cards), "570.1", round(node.host_gib * GIB))
        gib = dict(enumerate(map(float, node.gib)))
        return ClusterNode(node.name, key, HOST, machine, gib, node.missing, reserved)

    def _problem(self, message: StartEngine) -> str:
        if (node := self.state.nodes.get(message.node)) is None:
            return f"the node {message.node} is gone"
        free = [0.0 if node.is_full else size - node.reserved_gib for size in node.gib]
        for start, _ in self._engines.values():
            for number in start.gpus if start.node == message.node else []:
                free[number] -= start.gib
        if any(free[number] < message.gib for number in message.gpus):
            return f"other Ray jobs have the memory of GPU {message.gpus[0]} of {message.node}"
        return ""

    async def _keep_engine(self, message: StartEngine) -> None:
        if problem := self._problem(message):
            answer(EngineEnded(message.engine, problem, no_room=True))
            return
        folder = self._folder / str(message.engine)
        folder.mkdir()
        write_binding(folder, Binding(HOST, message.client_key))
        process = await start_async(
            [sys.executable, *message.command, str(folder), str(message.client_count)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
        )
        self._engines[message.engine] = message, process
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(message.config) + b"\n")
        process.stdin.close()
        if self.state.nodes[message.node].evicts_starts:
            del self._engines[message.engine]
            answer(EngineEnded(message.engine, f"node {message.node}: its memory is low", is_evicted=True))
            return
        while (listening := read_listening(folder)) is None and process.returncode is None:  # noqa: ASYNC110 - a file
            await asyncio.sleep(_POLL_S)
        if listening is not None:
            answer(EngineListening(message.engine, HOST, listening, process.pid))
        how = describe_exit(await process.wait())
        if self._engines.pop(message.engine, None) is not None:
            answer(EngineEnded(message.engine, how))


def answer(message: FromDriver) -> None:
    line = msgspec.json.encode(message) + b"\n"
    note(line)
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def note(line: bytes) -> None:
    """Keep a line that goes to the driver, or comes from it."""
    with (Path(sys.argv[1]).parent / LINES).open("ab") as lines:
        lines.write(line)


def drive(path: Path) -> None:
    """Be the driver, until the end of the input."""
    if msgspec.json.decode(path.read_bytes(), type=State).refuses:
        answer(ClusterFailed("nothing answers there: Connection refused"))
        return
    asyncio.run(Driver(path, Path(tempfile.mkdtemp(dir=path.parent))).run())


def noted(folder: Path) -> list[ToDriver | FromDriver]:
    """The lines to and from all drivers, in order; folder: of the cluster's state."""
    decoder = msgspec.json.Decoder(ToDriver | FromDriver)
    return [decoder.decode(line) for line in (folder / LINES).read_bytes().splitlines()]


def starts(folder: Path, model: str) -> list[str]:
    """The nodes that were asked to start an engine of a model, in order; folder: of the cluster's state."""
    found = [message for message in noted(folder) if isinstance(message, StartEngine)]
    return [start.node for start in found if start.model == model]


def use_scripted_cluster(patch: Any = setattr) -> None:
    """Let this module answer for the cluster that `--ray STATE.json` names; tests wait less for room."""
    for user in (meltcore.fleet.plan.cluster, meltcore.fleet.ray.cluster_driver):
        patch(user, "DRIVER_MODULE", "scripted_cluster")
    patch(meltcore.fleet.run.served_model, "ROOM_POLL_S", ROOM_POLL_S)
    patch(meltcore.fleet.run.supervised_model, "ROOM_POLL_S", ROOM_POLL_S)
    patch(meltcore.fleet.ray.cluster_driver, "_MAX_RETRY_S", RETRY_S)
    patch(meltcore.fleet.ray.cluster_driver, "_FIRST_RETRY_S", RETRY_S)
    patch(meltcore.fleet.ray.cluster_driver, "_PING_S", PING_S)
    patch(meltcore.fleet.processes.remote_engine, "ORPHAN_S", ORPHAN_S)


def serve() -> int:
    """Be the server, as `meltcore up FLEET.yaml --ray STATE.json`."""
    fleet, address, policy, *engine = sys.argv[1:]
    planner = FleetPlanner(Path(fleet), cluster_reader(address))
    options = fleet_options(planner)
    options = dataclasses.replace(options, policy=msgspec.json.decode(policy, type=RestartAfterPause))
    add = Supervisor.add_fleet_model

    async def add_late(*called: Any) -> Any:
        """Give a pending engine time to be tried again between the end of a model and its successor."""
        await asyncio.sleep(float(os.environ.get("PAUSE_BEFORE_ADDING_S", "0")))
        return await add(*called)

    Supervisor.add_fleet_model = add_late  # type: ignore[assignment,method-assign]
    return serve_recorded(planner.config(), "", options, engine_command=engine)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        use_scripted_cluster()
        os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        sys.exit(serve() if len(sys.argv) > 3 else serve_in_background())
    drive(Path(sys.argv[1]))
    os._exit(0)  # a thread may still read the input
