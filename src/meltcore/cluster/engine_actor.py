"""The actor that starts, watches and ends one engine process on its node. It knows nothing of what the engine does."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import msgspec

from meltcore.errors import EngineDeadError
from meltcore.fleet.placement import visible_gpus
from meltcore.host_memory import ONE_ARENA_ENVIRONMENT
from meltcore.process import STDERR, describe_exit, signal_group, start_async
from meltcore.protocol.cluster import StartEngine
from meltcore.protocol.tcp import read_port, write_binding

_LISTEN_LIMIT_S = 60.0  # for the interpreter and its imports
_POLL_S = 0.02


class EngineActor:
    """One engine process. Without the actor it goes on for as long as its server is connected to it."""

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="meltcore-engine-"))  # that only this user may enter

    async def start(self, encoded: bytes) -> tuple[str, int, int]:
        """Start the engine of a `StartEngine`, encoded as JSON; returns its host, port and process id.

        Raises EngineDeadError where it does not listen.
        """
        import ray

        message = msgspec.json.decode(encoded, type=StartEngine)
        host = ray.util.get_node_ip_address()
        write_binding(self._folder, msgspec.structs.replace(message.binding, host=host))
        process = self._process = await start_async(
            [sys.executable, *message.command, str(self._folder), str(message.client_count)],
            stdin=subprocess.PIPE,
            stdout=STDERR,  # which Ray sends to the driver
            environment=engine_environment(message),
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(message.config) + b"\n")
        process.stdin.close()
        port = await self._wait_listening(process)
        return host, port, process.pid

    async def _wait_listening(self, process: asyncio.subprocess.Process) -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_LIMIT_S):
                while (port := read_port(self._folder)) is None and process.returncode is None:  # noqa: ASYNC110 - a file
                    await asyncio.sleep(_POLL_S)
                if port is not None:
                    return port
        self.kill()
        raise EngineDeadError(f"the engine ended before it listened ({describe_exit(await process.wait())})")

    async def wait(self) -> str:
        """Wait until the process has ended; returns how."""
        assert self._process is not None
        returncode = await self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)
        return describe_exit(returncode)

    def kill(self) -> None:
        """End the process and its group now."""
        if self._process is not None and self._process.returncode is None:
            signal_group(self._process.pid, signal.SIGKILL)


def engine_environment(message: StartEngine) -> dict[str, str]:
    """Return the environment of an engine on this node: its GPUs by name, or its part of the cores."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray sets 1
    environment |= ONE_ARENA_ENVIRONMENT
    if message.gpus:
        names = visible_gpus()
        return environment | {"CUDA_VISIBLE_DEVICES": ",".join(names[number] for number in message.gpus)}
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // message.cpu_engines)
    return environment | {"OMP_NUM_THREADS": str(threads)}
