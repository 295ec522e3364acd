"""A cluster of this machine alone: answers the lines of `protocol/cluster.py`, and starts engines as an actor does.

`python -m one_node ADDRESS` is the driver; the address is not used. Each engine is the process that the actor of a node
starts, with its own port and CURVE keys. It stands in for Ray, through which no token passes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from simulated_cluster import answer

from meltcore.common.gpus.machine import Machine
from meltcore.common.host_memory import host_available_bytes
from meltcore.common.process import KILL_LIMIT_S, describe_exit, end_async, start_async
from meltcore.fleet.plan.machine import unloadable
from meltcore.protocol.cluster import (
    ClusterNode,
    EngineEnded,
    EngineListening,
    KillEngine,
    Nodes,
    Ping,
    Pong,
    ReadNodes,
    StartEngine,
    ToDriver,
)
from meltcore.protocol.tcp import Binding, read_listening, write_binding

NODE, HOST = "n00", "127.0.0.1"
_LISTEN_LIMIT_S, _POLL_S = 60.0, 0.02


class Driver:
    """Starts, watches and ends engine processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._engines: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Answer until the end of the input, then end all engines."""
        decode = msgspec.json.Decoder(ToDriver).decode
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            message = decode(line)
            if isinstance(message, Ping):
                answer(Pong())
            elif isinstance(message, ReadNodes):
                missing = await asyncio.to_thread(unloadable, message.checkpoints)
                answer(Nodes([ClusterNode(NODE, NODE, HOST, Machine((), "", host_available_bytes()), {}, missing)]))
            elif isinstance(message, StartEngine):
                task = asyncio.create_task(self._keep_engine(message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            elif isinstance(message, KillEngine) and (process := self._engines.get(message.engine)) is not None:
                await end_async(process, 0.0)
        for process in self._engines.values():
            await end_async(process, KILL_LIMIT_S)

    async def _keep_engine(self, message: StartEngine) -> None:
        folder = self._folder / str(message.engine)
        folder.mkdir()
        write_binding(folder, Binding(HOST, message.client_key))
        process = self._engines[message.engine] = await start_async(
            [sys.executable, *message.command, str(folder), str(message.client_count)],
            stdin=subprocess.PIPE,
            stdout=sys.stderr,
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(message.config) + b"\n")
        process.stdin.close()
        deadline_s = time.monotonic() + _LISTEN_LIMIT_S
        while (  # noqa: ASYNC110 - a file
            (listening := read_listening(folder)) is None
            and process.returncode is None
            and time.monotonic() < deadline_s
        ):
            await asyncio.sleep(_POLL_S)
        if listening is None:
            await end_async(process, 0.0)
        else:
            answer(EngineListening(message.engine, HOST, listening, process.pid))
        answer(EngineEnded(message.engine, describe_exit(await process.wait())))


def main() -> int:
    """Be the driver, until the end of the input."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("address")
    parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(Driver(Path(folder)).run())
    os._exit(0)  # a thread may still read the input


if __name__ == "__main__":
    sys.exit(main())
