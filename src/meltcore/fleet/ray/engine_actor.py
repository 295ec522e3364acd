"""Starts, watches and ends one engine process on its node, as a Ray actor. The actor does not read engine messages."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from meltcore.common.errors import EngineDeadError
from meltcore.common.gpus.machine import gpu_environment, visible_gpus
from meltcore.common.host_memory import ONE_ARENA_ENVIRONMENT
from meltcore.common.process import describe_exit, group_members, signal_group, start_async
from meltcore.fleet.plan.placement import shared_engine
from meltcore.fleet.ray.node_folder import NodeFolder
from meltcore.protocol.cluster import StartEngine
from meltcore.protocol.tcp import Binding, Listening, read_listening, write_binding

_LISTEN_LIMIT_S = 60.0  # for the interpreter and its imports
_GROUP_LIMIT_S = 3.0  # for the other processes of an engine that has ended, such as its ranks
_POLL_S = 0.02
_OUTPUT_POLL_S = 0.2
_BLOCK_BYTES = 1 << 16
_OUTPUT_BYTES = 1 << 20  # of the file of what an engine prints; what has been read of it is dropped then


class EngineActor:
    """Runs one engine process.

    If the actor dies, the engine continues until its server disconnects.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process | None = None
        # The engine inherits the locks of both folders: it may outlive the actor.
        self._folder: NodeFolder | None = None
        self._marks: NodeFolder | None = None
        # A file, and no pipe: an engine that outlives the actor can print.
        self._output: Path | None = None
        self._output_at = 0
        self._is_closed = False
        self._spawning = asyncio.Lock()  # `close` leaves no process that `start` is about to have

    async def start(self, encoded: bytes) -> tuple[str, Listening, int]:
        """Start the engine that `encoded` describes, a `StartEngine` as JSON.

        Return the host, the port with its public key, and the process id. Raises EngineDeadError if the engine does not
        listen.
        """
        import ray

        message = msgspec.json.decode(encoded, type=StartEngine)
        host = ray.util.get_node_ip_address()
        async with self._spawning:
            process = await self._spawn(message, host)
        assert self._folder is not None
        listening = await self._wait_listening(process, self._folder.path)
        return host, listening, process.pid

    async def _spawn(self, message: StartEngine, host: str) -> asyncio.subprocess.Process:
        if self._is_closed:
            raise EngineDeadError("its start was cancelled")
        folder = self._folder = NodeFolder(f"engine-{secrets.token_hex(8)}")
        write_binding(folder.path, Binding(host, message.client_key))
        self._output = folder.path / "output"
        self._marks = NodeFolder(f"marks-{message.fleet}")
        gpus = [f"node:{number}" for number in message.gpus]
        config = shared_engine(message.config, gpus, message.sharing, message.priority_class, self._marks.path)
        with self._output.open("ab") as output:
            process = self._process = await start_async(
                [sys.executable, *message.command, str(folder.path), str(message.client_count)],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                environment=engine_environment(message),
                pass_fds=(folder.descriptor, self._marks.descriptor),
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.close()
        return process

    async def _wait_listening(self, process: asyncio.subprocess.Process, folder: Path) -> Listening:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LISTEN_LIMIT_S):
                while (found := read_listening(folder)) is None and process.returncode is None:  # noqa: ASYNC110 - a file
                    await asyncio.sleep(_POLL_S)
                if found is not None:
                    return found
        self.kill()
        raise EngineDeadError(f"the engine ended before it listened ({describe_exit(await process.wait())})")

    async def wait(self) -> str:
        """Wait until the process has ended. Return a text that says how it has ended."""
        assert self._process is not None
        return describe_exit(await self._process.wait())

    async def read_output(self) -> bytes:
        """Wait until the process writes output, and return this output.

        Returns b"" when the process has ended and all output was read.
        """
        while True:
            has_ended = self._process is not None and self._process.returncode is not None
            if data := self._new_output():
                return data
            if has_ended:
                return b""
            await asyncio.sleep(_OUTPUT_POLL_S)

    def _new_output(self) -> bytes:
        if self._output is None or not self._output.exists():  # the process has not been started
            return b""
        with self._output.open("rb") as file:
            file.seek(self._output_at)
            data = file.read(_BLOCK_BYTES)
        self._output_at += len(data)
        if self._output_at > _OUTPUT_BYTES and len(data) < _BLOCK_BYTES:
            os.truncate(self._output, 0)  # the process appends
            self._output_at = 0
        return data

    async def close(self) -> str:
        """End the process and its process group if they still run, and remove their files. No process starts later.

        Return the ids of processes that have not ended as text, or "" if all have ended.
        """
        self._is_closed = True
        async with self._spawning:
            self.kill()
        if self._process is not None:
            await self._process.wait()  # it holds the locks
        with suppress(TimeoutError):
            async with asyncio.timeout(_GROUP_LIMIT_S):
                while self._group():  # noqa: ASYNC110 - the kernel may take long, as in a driver call
                    await asyncio.sleep(_POLL_S)
        for folder in (self._folder, self._marks):  # other engines may have the marks
            if folder is not None:
                folder.close()
        return ", ".join(map(str, self._group()))

    def kill(self) -> None:
        """Kill the process group immediately, even if the process itself has already ended."""
        if self._process is not None and self._group():
            signal_group(self._process.pid, signal.SIGKILL)

    def _group(self) -> list[int]:
        """Return the ids of the processes of the group that have not ended."""
        if self._process is None:
            return []
        members = group_members(self._process.pid)
        # Another process has the id of one that has ended: it leads another group, and this one was empty before.
        return [] if self._process.returncode is not None and self._process.pid in members else members


def engine_environment(message: StartEngine) -> dict[str, str]:
    """Return the environment of an engine on this node: the names of its GPUs, or the number of threads on the CPU."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}  # Ray sets 1
    environment |= ONE_ARENA_ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}
    if message.gpus:
        names = visible_gpus()
        return environment | gpu_environment([names[number] for number in message.gpus])
    threads = max(1, (len(os.sched_getaffinity(0)) - 1) // message.cpu_engines)
    return environment | {"OMP_NUM_THREADS": str(threads)}
