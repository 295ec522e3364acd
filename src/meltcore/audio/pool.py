"""Runs the audio workers of one API server process: started on demand, killed if they hang.

A worker that decodes has one file at a time. A worker that encodes has several files, whose speech is still being
synthesized.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec

import msgspec

from meltcore.audio.messages import (
    LENGTH_BYTES,
    Decode,
    Decoded,
    DecodedClip,
    DropFile,
    Encode,
    Encoded,
    FromWorker,
    NotDecoded,
    ToWorker,
)
from meltcore.common.errors import RequestError
from meltcore.common.process import ProcessError, end_async, kill_async, start_async

_COMMAND = (sys.executable, "-m", "meltcore.audio.worker")
# Of CPU time, per file to decode or piece to encode. Three hours of MP3 take about 25 s; minutes of speech take about a
# second to encode. What takes longer was made to.
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
        """Yield the clips of a file, and at the end its duration in seconds. A slow consumer makes the worker wait.

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
        """Return a context that lends a worker. A worker that has not answered in full at the end is killed."""
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
                    await kill_async(worker)

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


def missing_package(format_name: str) -> str | None:
    """Return the name of the package that a format needs and that is missing, or None."""
    return "PyAV (meltcore[av])" if format_name == "aac" and find_spec("av") is None else None


@dataclass(eq=False)
class _Worker:
    """A worker process, its open files, and the lock that a caller holds while it exchanges messages."""

    process: asyncio.subprocess.Process
    num_files: int = 0
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class EncodedFile:
    """A file that a worker process is encoding."""

    def __init__(self, encoders: AudioEncoders, worker: _Worker, file_id: int, encoding: tuple[str, int, bool]) -> None:
        self._encoders = encoders
        self._worker = worker
        self._file_id = file_id
        self._encoding = encoding

    async def add(self, samples: bytes, *, is_last: bool) -> bytes:
        """Encode more float32 samples. Returns the bytes that are ready. Raises RequestError (500) after a failure."""
        return await self._encoders.exchange(
            self._worker, Encode(self._file_id, *self._encoding, samples, is_last, CPU_LIMIT_S)
        )


class AudioEncoders:
    """Encodes audio in up to `max_workers` processes, by default one per two cores.

    A new file goes to the process with the fewest files.
    """

    def __init__(self, max_workers: int | None = None) -> None:
        self._max_workers = max_workers or max(1, len(os.sched_getaffinity(0)) // 2)
        self._workers: list[_Worker] = []
        self._starting = asyncio.Lock()
        self._file_ids = itertools.count()
        self._exchanges: set[asyncio.Task[bytes]] = set()  # the loop itself holds tasks weakly

    @asynccontextmanager
    async def open(self, format_name: str, sample_rate: int, *, is_whole: bool) -> AsyncIterator[EncodedFile]:
        """Begin a file, and drop it when the block ends. `encode.make_encoder` explains the arguments."""
        worker, file_id = await self._choose(), next(self._file_ids)
        worker.num_files += 1
        try:
            yield EncodedFile(self, worker, file_id, (format_name, sample_rate, is_whole))
        finally:
            worker.num_files -= 1
            self._begin(worker, DropFile(file_id))

    async def warm_up(self, sample_rate: int) -> None:
        """Start a process and load its libraries. Otherwise the first speech would wait for both."""
        with suppress(RequestError, ProcessError):  # then the first speech tries again, and reports it
            async with self.open("mp3", sample_rate, is_whole=True) as file:
                await file.add(bytes(4 * sample_rate), is_last=True)

    async def exchange(self, worker: _Worker, message: Encode) -> bytes:
        """Send a message and return the worker's answer. If the caller is cancelled, the exchange still completes."""
        return await asyncio.shield(self._begin(worker, message))

    async def close(self) -> None:
        """End all processes."""
        workers, self._workers = self._workers, []
        await asyncio.gather(*(end_worker(worker.process) for worker in workers))

    def _begin(self, worker: _Worker, message: Encode | DropFile) -> asyncio.Task[bytes]:
        task = asyncio.create_task(self._exchange_in_order(worker, message))
        self._exchanges.add(task)
        task.add_done_callback(self._forget_exchange)
        return task

    def _forget_exchange(self, task: asyncio.Task[bytes]) -> None:
        self._exchanges.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that has gone does not ask for it, and asyncio would report it

    async def _exchange_in_order(self, worker: _Worker, message: Encode | DropFile) -> bytes:
        async with worker.lock:
            try:
                await send(worker.process, message)
                answer = await receive(worker.process) if isinstance(message, Encode) else Encoded(b"")
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
                if worker in self._workers:
                    self._workers.remove(worker)
                await kill_async(worker.process)
                raise RequestError("the process that encodes the speech has failed", status=500) from error
        assert isinstance(answer, Encoded)
        return answer.data

    async def _choose(self) -> _Worker:
        """Return the process with the fewest files. A new process is started if all have files and more are allowed."""
        async with self._starting:
            worker = min(self._workers, key=lambda each: each.num_files, default=None)
            if worker is None or (worker.num_files and len(self._workers) < self._max_workers):
                worker = _Worker(await start_worker())
                self._workers.append(worker)
            return worker
