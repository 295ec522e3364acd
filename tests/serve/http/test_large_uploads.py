"""Uploads of 25 MB: what the event loop does for one of them between two of its turns, in CPU time."""

from __future__ import annotations

import asyncio
import io
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import uvloop
from waiting import WAIT_S

soundfile = pytest.importorskip("soundfile", reason="the extra audio has soundfile")
for package in ("python_multipart", "soxr"):
    pytest.importorskip(package, reason="the extra audio has it")

from meltcore.audio.pool import AudioWorkers  # noqa: E402
from meltcore.common.process import without_collection  # noqa: E402
from meltcore.serve.http.forms import read_multipart  # noqa: E402 - after the checks for extras
from meltcore.serve.http.http_server import HttpServer  # noqa: E402
from meltcore.serve.requests.asgi import read_body, send_bytes  # noqa: E402
from meltcore.serve.requests.request_fields import header  # noqa: E402
from meltcore.serve.requests.stats import EVENT_LOOP_LAG, ServerStats  # noqa: E402

TOGETHER, ALONE = 6, 4  # uploads at the same time, then one after another
LIMIT_S = 0.02  # of CPU time in one turn; read, parsed and copied whole, an upload took 0.06 s


def large_wav() -> bytes:
    """Two seconds, so that decoding is quick: 25 MB are eight channels of doubles at 192 kHz."""
    samples = np.random.default_rng(1).uniform(-0.5, 0.5, 2 * 192_000)
    file = io.BytesIO()
    soundfile.write(file, np.tile(samples[:, None], 8), 192_000, format="WAV", subtype="DOUBLE")
    assert 23 * 2**20 < len(file.getvalue()) < 25 * 2**20
    return file.getvalue()


@pytest.mark.slow
def test_large_uploads_do_not_stop_the_event_loop() -> None:
    """A turn of the loop does a piece of every upload that has data, and so only turns with one upload are judged."""
    wav = large_wav()
    form = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n' + wav + b"\r\n--x--\r\n"
    head = b"POST / HTTP/1.1\r\nhost: t\r\ncontent-type: multipart/form-data; boundary=x\r\n"
    head += b"content-length: %d\r\n\r\n" % len(form)
    turns_s: list[float] = []
    received: list[bool] = []

    async def watch() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(0.001)
            turns_s.append(time.thread_time() - last_s)
            last_s = time.thread_time()

    def upload(connection: socket.socket) -> bytes:
        connection.sendall(head)
        connection.sendall(form)
        return connection.recv(1000)

    async def run() -> list[bytes]:
        workers, stats = AudioWorkers(2), ServerStats()

        async def application(scope: Any, receive: Any, send: Any) -> None:
            body = await read_body(scope, receive, 26 * 2**20)
            [(_, data)] = await read_multipart(body, (header(scope, b"content-type") or b"").decode())
            assert isinstance(data, bytes)
            received.append(await asyncio.to_thread(data.__eq__, wav))
            parts = workers.decode(data, sample_rate=16_000, max_clip_s=30.0, max_audio_s=60.0)
            clips = [part async for part in parts]
            await send_bytes(send, b"%d parts" % len(clips), b"text/plain")

        server = HttpServer(application, stats)
        serving = asyncio.create_task(server.serve())
        pairs = [socket.socketpair() for _ in range(TOGETHER + ALONE)]
        for client, connection in pairs:
            client.settimeout(WAIT_S)
            connection.setblocking(False)
            server.add_connection(connection)
        clients = [client for client, _ in pairs]
        with ThreadPoolExecutor(TOGETHER) as pool:
            loop = asyncio.get_running_loop()
            answers = await asyncio.gather(*(loop.run_in_executor(pool, upload, each) for each in clients[:TOGETHER]))
            watching = asyncio.create_task(watch())
            answers += [await loop.run_in_executor(pool, upload, each) for each in clients[TOGETHER:]]
        watching.cancel()
        with suppress(asyncio.CancelledError):
            await watching
        for client, _ in pairs:
            client.close()
        await workers.close()
        server.stop()
        await serving
        assert stats.event_loop_lag.totals()[0][-1][1] >= 3, "the timer of the lag runs"
        return answers

    with without_collection():  # of what other tests have loaded, in a turn of the loop
        answers = uvloop.run(asyncio.wait_for(run(), WAIT_S))
    assert all(answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"2 parts") for answer in answers)
    assert received == [True] * (TOGETHER + ALONE)
    turns_s.sort()
    assert turns_s[int(0.99 * len(turns_s))] < LIMIT_S, turns_s[-30:]
    assert turns_s[-1] < 5 * LIMIT_S


def test_a_stopped_event_loop_is_seen_as_lag() -> None:
    async def run() -> dict[str, float]:
        stats = ServerStats()
        server = HttpServer(lambda *_: None, stats)  # type: ignore[arg-type,return-value]
        serving = asyncio.create_task(server.serve())
        await asyncio.sleep(0.08)
        time.sleep(0.4)  # noqa: ASYNC251 - the fault
        await asyncio.sleep(0.08)
        server.stop()
        await serving
        return dict(stats.event_loop_lag.totals()[0])

    buckets = uvloop.run(run())
    assert list(buckets) == [*map(str, EVENT_LOOP_LAG[2]), "+Inf"]
    assert buckets["+Inf"] - buckets["0.25"] >= 1
    assert buckets["0.1"] >= 1
