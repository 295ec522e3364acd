"""A share of a level in a process of its own: both ends of the pipe between them.

Frames are a length (4 bytes, little-endian) and msgpack. Parent: Setup, then Release, and Stop at any time. Worker:
Opened, then Batches, then End. `time.monotonic()` is one clock for all processes of a machine, so times need no shift.
A worker whose parent goes away reads end-of-file and leaves.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from typing import Any

import msgspec
import uvloop

from meltcore.errors import MeltcoreError
from meltcore.load.record import Record
from meltcore.load.share import LocalShare, OnRecords, Setup, ShareEnd

_LENGTH_BYTES = 4
_START = "from meltcore.load.worker import main; main()"
_LEAVE_S = 5.0


class Release(msgspec.Struct, tag="release"):
    at_s: float


class Stop(msgspec.Struct, tag="stop"):
    pass


class Opened(msgspec.Struct, tag="opened"):
    connected: int


class Batch(msgspec.Struct, tag="batch"):
    records: list[Record]
    in_flight: int


class End(msgspec.Struct, tag="end"):
    end: ShareEnd


_decode_setup = msgspec.msgpack.Decoder(Setup).decode
_decode_order = msgspec.msgpack.Decoder(Release | Stop).decode
_decode_answer = msgspec.msgpack.Decoder(Opened | Batch | End).decode
_encode = msgspec.msgpack.Encoder().encode


def _frame(message: Any) -> bytes:
    body = _encode(message)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    """Raises asyncio.IncompleteReadError where the other end has gone."""
    length = int.from_bytes(await reader.readexactly(_LENGTH_BYTES), "little")
    return await reader.readexactly(length)


class RemoteShare:
    """The parent's end. Raises MeltcoreError where the worker dies before its end."""

    def __init__(self, setup: Setup, on_records: OnRecords) -> None:
        # The parent alone writes records; a worker never sees the path.
        self._setup = msgspec.structs.replace(setup, config=replace(setup.config, records_path=None))
        self._on_records = on_records
        self._process: asyncio.subprocess.Process | None = None
        self.in_flight = 0
        self.connected = 0

    async def open(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _START, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        self._write(self._setup)
        answer = await self._read()
        assert isinstance(answer, Opened)
        self.connected = answer.connected

    async def run(self, release_at_s: float) -> ShareEnd:
        assert self._process is not None
        self._write(Release(release_at_s))
        while not isinstance(answer := await self._read(), End):
            assert isinstance(answer, Batch)
            self.in_flight = answer.in_flight
            self._on_records(answer.records)
        self.in_flight = 0
        await asyncio.wait_for(self._process.wait(), _LEAVE_S)
        return answer.end

    def stop(self) -> None:
        self._write(Stop())

    def _write(self, message: Any) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(_frame(message))

    async def _read(self) -> Opened | Batch | End:
        assert self._process is not None
        assert self._process.stdout is not None
        try:
            return _decode_answer(await _read_frame(self._process.stdout))
        except asyncio.IncompleteReadError as error:
            status = await asyncio.wait_for(self._process.wait(), _LEAVE_S)
            raise MeltcoreError(f"a load worker ended early with status {status}; its error stands above") from error


async def _work() -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", buffering=0))
    # Blocking writes: a batch is small, and the pipe is read at once.
    out = os.fdopen(1, "wb", buffering=0)

    def write(message: Any) -> None:
        frame = memoryview(_frame(message))
        while frame:
            frame = frame[out.write(frame) or 0 :]

    share = LocalShare(_decode_setup(await _read_frame(reader)), lambda records: write(Batch(records, share.in_flight)))
    await share.open()
    write(Opened(share.connected))
    order = _decode_order(await _read_frame(reader))
    if isinstance(order, Stop):
        share.stop()
        write(End(await share.run(0.0)))
        return
    obedience = asyncio.ensure_future(_obey(reader, share))
    write(End(await share.run(order.at_s)))
    obedience.cancel()


async def _obey(reader: asyncio.StreamReader, share: LocalShare) -> None:
    try:
        _decode_order(await _read_frame(reader))
    except asyncio.IncompleteReadError:
        os._exit(1)  # nobody is left to hand records to
    share.stop()


def main() -> None:
    """The worker process: serve one share over the standard streams, then leave."""
    # Ctrl-C and a terminal's end reach every process of the terminal; the parent alone decides, and tells us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    uvloop.run(_work())
