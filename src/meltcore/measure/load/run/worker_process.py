"""Runs a worker in another process, and implements both ends of the pipe between the worker and its parent.

Each message is a frame: its length (4 bytes, little-endian), then msgpack. The parent sends WorkerSettings, then
Release, and Stop at any time. The worker sends ConnectionsOpened, then RecordBatches, then WorkerDone.
`time.monotonic()` is one clock for all processes of a machine, so times need no conversion. If the parent dies, the
worker reads end-of-file and exits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import uvloop

from meltcore.common import process
from meltcore.common.errors import MeltcoreError
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.worker import LocalWorker, OnRecords, WorkerResult, WorkerSettings

_LENGTH_BYTES = 4
_COMMAND = (sys.executable, "-c", "from meltcore.measure.load.run.worker_process import main; main()")
_EXIT_LIMIT_S = 5.0


class Release(msgspec.Struct, tag="release"):
    """Tells the worker to send its first requests at the time.monotonic() `at_s`."""

    at_s: float


class Stop(msgspec.Struct, tag="stop"):
    """Tells the worker to fail its requests in flight and to send no more."""


class ConnectionsOpened(msgspec.Struct, tag="opened"):
    """Reports that every connection has been opened or has failed."""

    num_connections: int


class RecordBatch(msgspec.Struct, tag="batch"):
    """Carries the records of requests that have ended."""

    records: list[RequestRecord]
    in_flight: int


class WorkerDone(msgspec.Struct, tag="done"):
    """Reports that the worker has sent the records of all its requests."""

    result: WorkerResult


_decode_settings = msgspec.msgpack.Decoder(WorkerSettings).decode
_decode_from_parent = msgspec.msgpack.Decoder(Release | Stop).decode
_decode_from_worker: msgspec.msgpack.Decoder[ConnectionsOpened | RecordBatch | WorkerDone] = msgspec.msgpack.Decoder(
    ConnectionsOpened | RecordBatch | WorkerDone
)
_encode = msgspec.msgpack.Encoder().encode


def _encode_frame(message: Any) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the body of the next frame. Raises asyncio.IncompleteReadError if the pipe was closed."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    return await reader.readexactly(length)


class WorkerProcess:
    """Implements a worker in another process, as the parent sees it.

    Its methods raise MeltcoreError if the process ends before the worker is done.
    """

    def __init__(self, settings: WorkerSettings, on_records: OnRecords) -> None:
        # Only the parent writes records; a worker never gets the path.
        self._settings = msgspec.structs.replace(settings, config=replace(settings.config, records_path=None))
        self._on_records = on_records
        self._process: asyncio.subprocess.Process | None = None
        self.in_flight = 0
        self.num_connections = 0

    async def open(self) -> None:
        """Start the process, which opens the connections of a closed loop."""
        # In our process group: it ends with the pipe, whatever ends the parent.
        self._process = await process.start_async(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, new_session=False
        )
        self._send(self._settings)
        message = await self._receive()
        assert isinstance(message, ConnectionsOpened)
        self.num_connections = message.num_connections

    async def run(self, release_at_s: float) -> WorkerResult:
        """Send requests from `release_at_s` (time.monotonic) on. Return the result once all requests have records."""
        assert self._process is not None
        self._send(Release(release_at_s))
        while not isinstance(message := await self._receive(), WorkerDone):
            assert isinstance(message, RecordBatch)
            self.in_flight = message.in_flight
            self._on_records(message.records)
        self.in_flight = 0
        await process.end_async(self._process, _EXIT_LIMIT_S)
        return message.result

    def stop(self) -> None:
        """Fail the requests in flight as interrupted and send no more, so that `run` returns.

        The call has no effect after the run has ended.
        """
        assert self._process is not None
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._send(Stop())

    def _send(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(_encode_frame(message))

    async def _receive(self) -> ConnectionsOpened | RecordBatch | WorkerDone:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            return _decode_from_worker.decode(await _read_frame(self._process.stdout))
        except asyncio.IncompleteReadError as error:
            await process.end_async(self._process, _EXIT_LIMIT_S)
            exit_text = process.describe_exit(self._process.returncode or 0)
            raise MeltcoreError(f"a load worker ended early with {exit_text}; its error is printed above") from error


async def _run_worker() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", buffering=0))
    # Blocking writes: a batch is small, and the parent reads without delay.
    output = os.fdopen(1, "wb", buffering=0)

    def send(message: Any) -> None:
        frame = memoryview(_encode_frame(message))
        while frame:
            frame = frame[output.write(frame) or 0 :]

    settings = _decode_settings(await _read_frame(reader))
    worker = LocalWorker(settings, lambda records: send(RecordBatch(records, worker.in_flight)))
    await worker.open()
    send(ConnectionsOpened(worker.num_connections))
    message = _decode_from_parent(await _read_frame(reader))
    if isinstance(message, Stop):
        worker.stop()
        send(WorkerDone(await worker.run(0.0)))
        return
    stop_task = asyncio.ensure_future(_wait_for_stop(reader, worker))
    send(WorkerDone(await worker.run(message.at_s)))
    stop_task.cancel()


async def _wait_for_stop(reader: asyncio.StreamReader, worker: LocalWorker) -> None:
    try:
        _decode_from_parent(await _read_frame(reader))
    except asyncio.IncompleteReadError:
        os._exit(1)  # without a parent there is no receiver of records
    worker.stop()


def main() -> None:
    """Run one worker over the standard streams, then return."""
    # Ctrl-C and a terminal's hang-up reach every process of the terminal; the parent alone reacts, and sends Stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    uvloop.run(_run_worker())
