"""Runs the audio workers of one API server process: started on demand, one file at a time, killed if they hang."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress

import msgspec

from meltcore.audio.messages import (
    LENGTH_BYTES,
    Decode,
    Decoded,
    DecodedClip,
    FromWorker,
    NotDecoded,
    ToWorker,
)
from meltcore.common.errors import RequestError
from meltcore.common.process import end_async, start_async

_COMMAND = (sys.executable, "-m", "meltcore.audio.worker")
# Of CPU time, per file. Three hours of MP3 take about 25 s; what takes longer was made to.
CPU_LIMIT_S = 60
# Without an answer for so long a worker hangs. Its CPU limit ends it before, unless it waits for something.
ANSWER_LIMIT_S = 90.0
_EXIT_LIMIT_S = 2.0
_decode_message = msgspec.msgpack.Decoder(FromWorker).decode


class AudioWorkers:
    """Manages up to `max_workers` processes. Files wait in order until a process is free."""

    def __init__(self, max_workers: int | None = None, *, cpu_limit_s: int = CPU_LIMIT_S) -> None:
        """Create the pool without starting a process.

        The default `max_workers` is one per two cores, and at least one.
        """
        self._free: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._slots = asyncio.Semaphore(max_workers or max(1, len(os.sched_getaffinity(0)) // 2))
        self._cpu_limit_s = cpu_limit_s

    async def decode(
        self, data: bytes, *, sample_rate: int, max_clip_s: float, max_audio_s: float
    ) -> AsyncGenerator[DecodedClip | Decoded]:
        """Yield the clips of a file, and at the end its duration. A slow consumer makes the worker wait.

        Raises RequestError (400) for a file that cannot be decoded or exceeds a limit.
        """
        request = Decode(len(data), sample_rate, max_clip_s, max_audio_s, self._cpu_limit_s)
        async with self._lend_worker() as worker, aclosing(_exchange_messages(worker, request, data)) as messages:
            async for message in messages:
                if isinstance(message, NotDecoded):
                    raise RequestError(message.message, param="file", code="invalid_audio")
                yield message

    async def close(self) -> None:
        """End all workers."""
        self._free.clear()
        await asyncio.gather(*(end_worker(worker) for worker in self._all))
        self._all.clear()

    @asynccontextmanager
    async def _lend_worker(self) -> AsyncIterator[asyncio.subprocess.Process]:
        """Lend a worker to the block. The worker is killed unless it has answered in full."""
        async with self._slots:
            worker = self._free.pop() if self._free else await self._start()
            is_done = False
            try:
                yield worker
                is_done = worker.returncode is None
            except RequestError as error:
                is_done = worker.returncode is None and error.code == "invalid_audio"
                raise
            finally:
                if is_done:
                    self._free.append(worker)
                else:
                    self._all.discard(worker)
                    with suppress(ProcessLookupError):
                        worker.kill()
                    await worker.wait()

    async def _start(self) -> asyncio.subprocess.Process:
        worker = await start_worker()
        self._all.add(worker)
        return worker


async def _exchange_messages(
    worker: asyncio.subprocess.Process, request: Decode, data: bytes
) -> AsyncGenerator[DecodedClip | Decoded | NotDecoded]:
    """Send a request and its file, and yield the answers up to the last one."""
    try:
        await send(worker, request, data)
        while True:
            message = await receive(worker)
            assert isinstance(message, DecodedClip | Decoded | NotDecoded)
            yield message
            if not isinstance(message, DecodedClip):
                return
    except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
        raise RequestError(
            f"the audio could not be decoded within {request.cpu_s} s of CPU time and the worker's memory",
            param="file",
            code="audio_too_expensive",
        ) from error


async def start_worker() -> asyncio.subprocess.Process:
    """Start an audio worker process. Raises ProcessError."""
    return await start_async(_COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def send(worker: asyncio.subprocess.Process, message: ToWorker, data: bytes = b"") -> None:
    """Send a message, and bytes that follow it, within the time limit. Raises TimeoutError, ConnectionError."""
    assert worker.stdin is not None
    encoded = msgspec.msgpack.encode(message)
    async with asyncio.timeout(ANSWER_LIMIT_S):
        worker.stdin.write(len(encoded).to_bytes(LENGTH_BYTES, "big") + encoded)
        if data:  # as it is: a copy of 25 MB would stop the event loop for 15 ms
            worker.stdin.write(data)
        await worker.stdin.drain()


async def receive(worker: asyncio.subprocess.Process) -> FromWorker:
    """Return the next answer within the time limit. Raises TimeoutError, IncompleteReadError."""
    assert worker.stdout is not None
    async with asyncio.timeout(ANSWER_LIMIT_S):
        length = await worker.stdout.readexactly(LENGTH_BYTES)
        answer: FromWorker = _decode_message(await worker.stdout.readexactly(int.from_bytes(length, "big")))
        return answer


async def end_worker(worker: asyncio.subprocess.Process) -> None:
    """End a worker, which exits at the end of its stdin."""
    assert worker.stdin is not None
    worker.stdin.close()
    await end_async(worker, _EXIT_LIMIT_S)
