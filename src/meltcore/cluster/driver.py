"""The driver of a Ray cluster: `python -m meltcore.cluster.driver ADDRESS`; `protocol/cluster.py` has its lines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from meltcore.cluster.command_actor import run_on_nodes
from meltcore.cluster.engine_actor import EngineActor
from meltcore.cluster.nodes import KEEP_ENGINES, KEEP_VISIBLE, connect, living_nodes, read_nodes
from meltcore.errors import ConfigError, EngineDeadError, MeltcoreError
from meltcore.protocol.cluster import (
    ClusterFailed,
    EngineEnded,
    EngineListening,
    EngineOutput,
    FromDriver,
    KillEngine,
    Nodes,
    ReadNodes,
    RunOnNodes,
    StartEngine,
    ToDriver,
    gpu_resource,
)

_START_LIMIT_S = 120.0  # for a worker process of Ray, and the engine process to listen
_CALLS = 4  # of one actor that run together: start or wait, read its output, and kill
_REST_S = 2.0  # for the last output of an engine that has ended


class Driver:
    """Answers the lines of one process. Actors end with this process, and with them what they have started."""

    def __init__(self, answer: Callable[[FromDriver], None]) -> None:
        self._answer = answer
        self._actors: dict[int, Any] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until the end of the input."""
        decode = msgspec.json.Decoder(ToDriver).decode
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            message = decode(line)
            if isinstance(message, ReadNodes):
                await self._read_nodes(message)
            elif isinstance(message, KillEngine):
                if (actor := self._actors.get(message.engine)) is not None:
                    actor.kill.remote()
            else:
                if isinstance(message, RunOnNodes):
                    task = asyncio.create_task(run_on_nodes(message, self._answer))
                else:
                    task = asyncio.create_task(self._keep_engine(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _read_nodes(self, message: ReadNodes) -> None:
        try:
            self._answer(Nodes(await asyncio.to_thread(read_nodes, message.paths)))
        except MeltcoreError as error:
            self._answer(ClusterFailed(str(error)))

    async def _keep_engine(self, message: StartEngine) -> None:
        if message.node not in dict(living_nodes()):
            self._answer(EngineEnded(message.engine, f"the node {message.node} is gone", is_node_gone=True))
        else:
            self._answer(EngineEnded(message.engine, await self._run_engine(message)))

    async def _run_engine(self, message: StartEngine) -> str:
        """Start an engine and wait until it has ended; returns how."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        try:
            node = dict(living_nodes())[message.node]
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
            try:
                async with asyncio.timeout(_START_LIMIT_S):
                    host, port, pid = await actor.start.remote(msgspec.json.encode(message))
                self._answer(EngineListening(message.engine, host, port, pid))
                return str(await actor.wait.remote())
            finally:
                await self._close(message.engine, output)
        except TimeoutError:
            return f"node {message.node}: the engine does not listen within {_START_LIMIT_S:g} s"
        except ray.exceptions.RayTaskError as error:
            return f"node {message.node}: {error.cause}"
        except (ray.exceptions.RayError, EngineDeadError, KeyError) as error:
            first_line = str(error).strip().partition("\n")[0]
            return f"node {message.node} is gone, or its actor has died: {first_line}"

    async def _pass_output(self, engine: int, actor: Any) -> None:
        """Answer what an engine prints, until it has ended or its actor is gone."""
        import ray

        with suppress(ray.exceptions.RayError):
            while data := await actor.read_output.remote():
                self._answer(EngineOutput(engine, data))

    async def _close(self, engine: int, output: asyncio.Task[None]) -> None:
        """End an actor whose engine has ended, with its files, once its last output has come."""
        import ray

        actor = self._actors.pop(engine)
        await asyncio.wait({output}, timeout=_REST_S)  # it may be cancelled, at the end of this process
        with suppress(TimeoutError, ray.exceptions.RayError):
            async with asyncio.timeout(_REST_S):
                await actor.close.remote()
        ray.kill(actor)


def main() -> int:
    """Answer the lines of the standard input. Returns the exit status: 1 where the cluster cannot be reached."""
    # Standard output carries answers only: what Ray prints goes to standard error.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends

    def answer(message: FromDriver) -> None:
        out.write(msgspec.json.encode(message) + b"\n")
        out.flush()

    try:
        connect(sys.argv[1])
    except ConfigError as error:
        answer(ClusterFailed(str(error)))
        return 1
    asyncio.run(Driver(answer).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
