"""Runs the driver process of a Ray cluster: `python -m meltcore.fleet.ray.driver ADDRESS`.

`protocol/cluster.py` defines the lines that the process reads and writes.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError, EngineDeadError, MeltcoreError
from meltcore.fleet.ray.command_actor import run_on_nodes
from meltcore.fleet.ray.engine_actor import EngineActor
from meltcore.fleet.ray.nodes import (
    KEEP_ENGINES,
    KEEP_VISIBLE,
    NodeReader,
    connected,
    free_resources,
    living_nodes,
    names,
)
from meltcore.protocol.cluster import (
    ClusterFailed,
    ClusterState,
    EngineEnded,
    EngineListening,
    EngineOutput,
    FromDriver,
    KillEngine,
    Nodes,
    Ping,
    Pong,
    ReadNodes,
    RunOnNodes,
    StartEngine,
    ToDriver,
    gpu_resource,
)

_READY_LIMIT_S = 60.0  # for a worker process of Ray: there is none while other jobs have the memory
_START_LIMIT_S = 90.0  # for the engine process to listen
_ROOM_LIMIT_S, _ROOM_POLL_S = 5.0, 0.25  # for Ray to take back what the engine before it had
_CALLS = 4  # of one actor that run together: start or wait, read its output, and kill
_REST_S = 2.0  # for the last output of an engine that has ended
_CLOSE_LIMIT_S = 10.0  # for an engine to end that was killed, and its files to be removed
_THREADS = 128
_LOW_ON_MEMORY = (
    "the node {0} is low on memory: the memory monitor of Ray has ended the actor of the engine "
    "(RAY_memory_usage_threshold, of ray start)"
)
_HEAD_POLL_S, _HEAD_LIMIT_S = 2.0, 3.0  # the head node is asked so often, and has so long to answer


class Driver:
    """Answers the lines that one other process sends to this driver process.

    When the driver process ends, its actors end, and with them the processes that they have started.
    """

    def __init__(self, answer: Callable[[FromDriver], None]) -> None:
        self._answer = answer
        self._nodes = NodeReader()
        self._actors: dict[int, Any] = {}
        self._node_ids: dict[int, str] = {}  # of the node of each engine, which its name may outlive
        self._starting: dict[int, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._engines: set[asyncio.Task[None]] = set()  # those among them that keep an engine
        self._closing: set[asyncio.Task[None]] = set()  # those that end an actor

    async def run(self) -> None:
        """Answer lines until the input ends."""
        # Questions to a head node that is silent keep their threads.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
        watching: asyncio.Task[None] | None = None
        reading: asyncio.Task[None] | None = None
        decode = msgspec.json.Decoder(ToDriver).decode
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            message = decode(line)
            if isinstance(message, Ping):
                self._answer(Pong())
            elif isinstance(message, ReadNodes):
                names.keep(message.names)
                reading = self._keep(self._read_nodes(message, after=reading))
            elif isinstance(message, KillEngine):
                if (task := self._starting.pop(message.engine, None)) is not None:
                    task.cancel()
                elif (actor := self._actors.get(message.engine)) is not None:
                    actor.kill.remote()
            elif isinstance(message, RunOnNodes):
                self._keep(run_on_nodes(message, self._answer))
            else:
                self._starting[message.engine] = self._keep(self._keep_engine(message), self._engines)
            if watching is None:  # not before: it names the nodes, and the first line may have their names
                watching = self._keep(self._watch_head())
        if reading is not None:  # a question may be all that there is
            await reading
        for task in self._engines:
            task.cancel()
        while remaining := self._engines | self._closing:
            await asyncio.wait(remaining)

    def _keep(
        self, work: Coroutine[Any, Any, None], group: set[asyncio.Task[None]] | None = None
    ) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        for tasks in (self._tasks, group):
            if tasks is not None:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        return task

    async def _watch_head(self) -> None:
        """Query the head node at intervals. Report when it no longer answers, and when it answers again.

        Ray itself waits for the head node for a minute, and then ends this process.
        """
        is_lost = False
        while True:
            asked = asyncio.create_task(asyncio.to_thread(living_nodes))
            await asyncio.wait({asked}, timeout=_HEAD_LIMIT_S)
            if not asked.done():
                is_lost = True
                self._answer(ClusterState(f"the head node has not answered for {_HEAD_LIMIT_S:g} s"))
            with suppress(Exception):  # a question that fails is none that goes unanswered
                await asked
            if is_lost:
                is_lost = False
                self._answer(ClusterState(""))
            await asyncio.sleep(_HEAD_POLL_S)

    async def _read_nodes(self, message: ReadNodes, after: asyncio.Task[None] | None) -> None:
        """Answer a `ReadNodes` message after the task `after`, which answers the previous message of this kind."""
        if after is not None:
            await asyncio.wait({after})
        try:
            nodes = await asyncio.to_thread(self._nodes.read, message.checkpoints, message.limit_s, message.used)
            self._answer(Nodes(nodes))
        except MeltcoreError as error:
            self._answer(ClusterFailed(str(error)))
        except Exception as error:  # of Ray: each question has an answer
            self._answer(ClusterFailed(f"the nodes cannot be read: {type(error).__name__}: {error}"))

    async def _keep_engine(self, message: StartEngine) -> None:
        """Start an engine, wait until it has ended, and send an `EngineEnded`."""
        import ray

        ended = EngineEnded(message.engine, "its start was cancelled")
        try:
            ended = await self._run_engine(message)
        except ray.exceptions.RayTaskError as error:
            ended = EngineEnded(message.engine, f"node {message.node}: {error.cause}")
        except ray.exceptions.OutOfMemoryError:
            ended = EngineEnded(message.engine, _LOW_ON_MEMORY.format(message.node), is_evicted=True)
        except (ray.exceptions.RayError, EngineDeadError) as error:
            first_line = str(error).strip().partition("\n")[0]
            was_started = message.engine not in self._starting
            gone = await self._gone_text(message)
            reason = gone or f"node {message.node}: its actor has died: {first_line}"
            ended = EngineEnded(message.engine, reason, no_room=bool(gone) and not was_started)
        except Exception as error:  # of Ray; nothing says that the engine is at fault
            reason = f"node {message.node}: {type(error).__name__}: {error}"
            ended = EngineEnded(message.engine, reason, no_room=message.engine in self._starting)
        finally:
            self._starting.pop(message.engine, None)
            self._node_ids.pop(message.engine, None)
            self._answer(ended)

    async def _gone_text(self, message: StartEngine) -> str:
        """Return why the node of an engine is gone. Returns "" if the node lives."""
        node = dict(await asyncio.to_thread(living_nodes)).get(message.node)
        if node is None:
            return f"the node {message.node} is gone"
        is_same = self._node_ids.get(message.engine, node["NodeID"]) == node["NodeID"]
        return "" if is_same else f"Ray was started again on the node {message.node}"

    async def _run_engine(self, message: StartEngine) -> EngineEnded:
        """Start an engine, wait until it has ended, and return its `EngineEnded`.

        Raises errors of Ray, and EngineDeadError if the engine does not start.
        """
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node = dict(await asyncio.to_thread(living_nodes)).get(message.node)
        if node is None:
            return EngineEnded(message.engine, f"the node {message.node} is gone", no_room=True)
        if not await _has_room(node["NodeID"], message):
            reason = f"other Ray jobs have the memory of GPU {message.gpus[0]} of {message.node}"
            return EngineEnded(message.engine, reason, no_room=True)
        self._node_ids[message.engine] = node["NodeID"]
        # The plan has chosen the node. Ray counts the memory, so that no other job takes it.
        actor = self._actors[message.engine] = (
            ray.remote(EngineActor)
            .options(
                num_cpus=0,
                max_concurrency=_CALLS,
                resources={gpu_resource(number): message.gib for number in message.gpus},
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                runtime_env={"env_vars": KEEP_VISIBLE | KEEP_ENGINES},
            )
            .remote()
        )
        output = asyncio.create_task(self._pass_output(message.engine, actor))
        is_ready = False
        try:
            try:
                async with asyncio.timeout(_READY_LIMIT_S):
                    await actor.__ray_ready__.remote()
            except TimeoutError:
                reason = f"Ray has started no worker on {message.node} within {_READY_LIMIT_S:g} s"
                return EngineEnded(message.engine, reason, no_room=True)
            is_ready = True
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    host, listening, pid = await actor.start.remote(msgspec.json.encode(message))
            except TimeoutError:
                reason = f"node {message.node}: the engine does not listen within {_START_LIMIT_S:g} s"
                return EngineEnded(message.engine, reason)
            self._starting.pop(message.engine, None)
            self._answer(EngineListening(message.engine, host, listening, pid))
            return EngineEnded(message.engine, str(await actor.wait.remote()))
        finally:
            # It goes on where this task is cancelled, also in the middle of it.
            await asyncio.shield(self._keep(self._close(message, output, is_ready=is_ready), self._closing))

    async def _pass_output(self, engine: int, actor: Any) -> None:
        """Send the output of an engine to the supervisor, until the engine has ended or its actor is gone."""
        import ray

        with suppress(ray.exceptions.RayError):
            while data := await actor.read_output.remote():
                self._answer(EngineOutput(engine, data))

    async def _close(self, message: StartEngine, output: asyncio.Task[None], *, is_ready: bool) -> None:
        """End an actor, its engine and the engine's files, after the engine's last output has arrived.

        Ray would leave the engine running. `is_ready` says whether the actor has answered. Before its answer the actor
        has no engine and no files.
        """
        import ray

        actor, where = self._actors.pop(message.engine), f"node {message.node}: {message.model}"
        if is_ready:
            await asyncio.wait({output}, timeout=_REST_S)
            try:
                async with asyncio.timeout(_CLOSE_LIMIT_S):
                    if left := await actor.close.remote():
                        _print(f"{where}: its engine has ended, and these processes of it have not: {left}")
            except TimeoutError:
                _print(f"{where}: its actor has not ended its engine within {_CLOSE_LIMIT_S:g} s")
            except ray.exceptions.RayError:
                _print(f"{where}: its actor is gone; the next start there removes the files that its engine leaves")
        await asyncio.to_thread(ray.kill, actor)  # it asks the head node


def _print(line: str) -> None:
    print(f"meltcore: {line}", file=sys.stderr, flush=True)


async def _has_room(node_id: str, message: StartEngine) -> bool:
    """Return whether Ray can give an engine its memory now or within a few seconds."""
    deadline_s = time.monotonic() + _ROOM_LIMIT_S
    while message.gpus:
        free = (await asyncio.to_thread(free_resources)).get(node_id, {})
        if all(free.get(gpu_resource(number), 0.0) >= message.gib for number in message.gpus):
            return True
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_ROOM_POLL_S)
    return True


def main() -> int:
    """Answer the lines of the standard input. Return the exit status, which is 1 if the cluster cannot be reached."""
    # Standard output carries answers only: what libraries write to it goes to standard error.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # Ray prints its error messages there, with the last lines of a raylet's log, and has no setting for it.
    nowhere = sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - until the end
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends

    def answer(message: FromDriver) -> None:
        try:
            out.write(msgspec.json.encode(message) + b"\n")
            out.flush()
        except BrokenPipeError:  # the reader was killed, and the end of the input will end this process
            os.dup2(nowhere.fileno(), out.fileno())

    try:
        with connected(sys.argv[1]):
            asyncio.run(Driver(answer).run())
    except ConfigError as error:
        answer(ClusterFailed(str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
