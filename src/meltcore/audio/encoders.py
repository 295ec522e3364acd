"""Runs the encoding processes of one API server process. Each process encodes many files while they are spoken."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec

from meltcore.audio.messages import DropFile, Encode, Encoded
from meltcore.audio.pool import end_worker, receive, send, start_worker
from meltcore.common.errors import RequestError
from meltcore.common.process import ProcessError

# Of CPU time, per piece. Minutes of speech take about a second.
_CPU_LIMIT_S = 60


def missing_package(format_name: str) -> str | None:
    """Return the package that a format needs and that is not installed. Returns None if none is missing."""
    return "PyAV (meltcore[av])" if format_name == "aac" and find_spec("av") is None else None


@dataclass(eq=False)
class _Worker:
    """A worker process, its open files, and the lock that a caller holds while it exchanges messages."""

    process: asyncio.subprocess.Process
    num_files: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class EncodedFile:
    """A file that a worker process is encoding."""

    def __init__(self, encoders: AudioEncoders, worker: _Worker, file_id: int, form: tuple[str, int, bool]) -> None:
        self._encoders = encoders
        self._worker = worker
        self._file_id = file_id
        self._form = form

    async def add(self, samples: bytes, *, is_last: bool) -> bytes:
        """Encode more float32 samples. Returns the bytes that are ready. Raises RequestError (500)."""
        return await self._encoders.exchange(
            self._worker, Encode(self._file_id, *self._form, samples, is_last, _CPU_LIMIT_S)
        )


class AudioEncoders:
    """Up to `max_workers` processes, by default one per two cores.

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
        task = asyncio.create_task(self._take_turn(worker, message))
        self._exchanges.add(task)
        task.add_done_callback(self._forget_exchange)
        return task

    def _forget_exchange(self, task: asyncio.Task[bytes]) -> None:
        self._exchanges.discard(task)
        if not task.cancelled():
            task.exception()  # a caller that has gone does not ask for it, and asyncio would report it

    async def _take_turn(self, worker: _Worker, message: Encode | DropFile) -> bytes:
        async with worker.turn:
            try:
                await send(worker.process, message)
                answer = await receive(worker.process) if isinstance(message, Encode) else Encoded(b"")
            except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
                if worker in self._workers:
                    self._workers.remove(worker)
                with suppress(ProcessLookupError):
                    worker.process.kill()
                await worker.process.wait()
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
