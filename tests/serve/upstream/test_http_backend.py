"""Upstream servers through the real HTTP API: bytes, faults, time limits, retries, balance."""

from __future__ import annotations

import asyncio
import socket
from itertools import pairwise
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st
from upstream_tools import CHAT, DONE, EVENT, Received, Upstream, answer, chunk, sends, served, stream
from waiting import until

from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.upstream import http_attempt, http_backend, http_replica
from meltcore.serve.upstream.event_stream import MAX_HELD_BYTES, EventBuffer
from meltcore.serve.upstream.http_backend import HttpBackend
from meltcore.serve.upstream.http_connection import MAX_UNREAD_BYTES
from meltcore.settings.fleet_spec import LimitsSection, ModelSection, TimeoutsSection

END = chunk(b"")
WHOLE = b'{"id":"x", "model":"theirs",\n "choices":[]}'


def run(coroutine: Any) -> Any:
    return uvloop.run(coroutine)


# --- bytes


# threat: an upstream server: the client's key is not sent to it
def test_answers_come_through_as_they_are() -> None:
    """Body, status and headers of the answer; the request's body, path, id and trace."""

    async def check() -> None:
        upstream = Upstream(sends(answer(WHOLE)))
        async with served(upstream) as server:
            async with server.session.post(
                server.url + CHAT,
                data=b'{"model":"m",  "tools":[{"x":1.0}], "messages":[]}',
                headers={"x-request-id": "r1", "traceparent": "00-ab-cd-01", "authorization": "Bearer theirs"},
            ) as response:
                assert (response.status, await response.read()) == (200, WHOLE)
                assert response.headers["content-type"] == "application/json"
                assert response.headers["x-request-id"] == "r1"
            [received] = upstream.received
            assert received.body == b'{"model":"m",  "tools":[{"x":1.0}], "messages":[]}'
            assert received.line == f"POST {CHAT} HTTP/1.1"
            assert received.headers["x-request-id"] == "r1"
            assert received.headers["traceparent"] == "00-ab-cd-01"
            assert "authorization" not in received.headers, "the client's key is not the upstream's"
            refusal = b'{"error":{"message":"too long"}}'
            upstream.behave = sends(answer(refusal, status="400 Bad Request"))
            assert await server.ask() == (400, refusal)
            upstream.behave = sends(stream(EVENT, DONE, b""))
            assert await server.ask(stream=True) == (200, EVENT + DONE)
            server.check_no_leak()

    run(check())


def test_only_the_name_of_the_model_changes() -> None:
    async def check() -> None:
        upstream = Upstream(sends(answer(WHOLE)))
        async with served(upstream, upstream_model="org/big", upstream_key_env="PATH") as server:
            data = b'{"model": "m", "n":1.50, "messages":[{"content":"\\u0061 \xc3\xa9"}]}'
            async with server.session.post(server.url + CHAT, data=data) as response:
                assert await response.read() == WHOLE
            sent = upstream.received[0].body
            assert msgspec.json.decode(sent) == msgspec.json.decode(data) | {"model": "org/big"}
            assert b'"n":1.50' in sent
            assert b'"\\u0061 \xc3\xa9"' in sent, "values keep their bytes"
            assert upstream.received[0].headers["authorization"].startswith("Bearer /")

    run(check())


_ENDS = st.sampled_from([b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n"])
_EVENTS = st.tuples(
    st.binary(max_size=40).map(lambda data: b"data: " + data.replace(b"\n", b"").replace(b"\r", b"")), _ENDS
)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@settings(max_examples=200, deadline=None)
@given(
    events=st.lists(_EVENTS, max_size=8), cuts=st.lists(st.integers(0, 300), max_size=12), tail=st.binary(max_size=9)
)
def test_event_buffer_under_any_split(events: list[tuple[bytes, bytes]], cuts: list[int], tail: bytes) -> None:
    """The bytes stay; each piece ends after an event; a stream is whole exactly where it ends after one."""
    whole = b"".join(data + end for data, end in events)
    buffer, pieces = EventBuffer(), []
    for part in split(whole + tail, cuts):
        pieces.append(buffer.add(part))
        assert not pieces[-1] or pieces[-1].endswith((b"\n\n", b"\n\r\n", b"\r\r"))
    assert b"".join(pieces) + buffer.end() == whole + tail
    rest = (whole + tail)[len(b"".join(pieces)) :]
    assert buffer.is_whole == (not rest.strip(b"\r\n"))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(cuts=st.lists(st.integers(0, 400), max_size=10))
def test_stream_passes_under_any_split_of_its_bytes(cuts: list[int]) -> None:
    """Chunk edges, events and reads need not agree: heads and chunks are cut anywhere."""
    body = EVENT + b": ping\r\n\r\n" + EVENT * 2 + DONE
    data = stream(body[:30], body[30:91], body[91:], b"")

    async def check() -> None:
        async with served(Upstream(sends(*split(data, cuts)))) as server:
            assert await server.ask(stream=True) == (200, body)
            server.check_no_leak()

    run(check())


def test_event_that_is_too_long_to_hold_passes_in_parts() -> None:
    buffer = EventBuffer()
    assert buffer.add(b"data: " + b"x" * 100) == b""
    passed = buffer.add(b"x" * MAX_HELD_BYTES)
    assert len(passed) > MAX_HELD_BYTES
    assert not buffer.is_whole
    assert buffer.add(b"\n") == b""
    rest = buffer.add(b"\n")
    assert rest.endswith(b"\n\n")
    assert buffer.is_whole
    buffer.add(b"data: " + b"x" * MAX_HELD_BYTES + b"\r\n")
    assert not buffer.is_whole, "its empty line is missing, though only the end of a line is held"


# --- faults


@pytest.mark.slow
@pytest.mark.parametrize(
    ("behave", "status", "message"),
    [
        (sends(answer(b"<h1>hi</h1>", content_type="text/html")), 502, "'text/html' (status 200)"),
        (sends(answer(b"no", status="500 No", content_type="text/plain")), 502, "'text/plain' (status 500)"),
        (sends(answer(b"{}")), 502, "'application/json' (status 200) instead of text/event-stream"),
        (sends(answer(b"", status="302 Found\r\nLocation: http://10.0.0.1/")), 502, "a redirect"),
        (sends(b"\x15\x03 not http\r\n\r\n"), 502, "not HTTP"),
        (sends(stream(b""), then="close"), 502, "ended before the first whole event"),
        (sends(stream(EVENT[:20], b"")), 502, "ended before the first whole event"),
        (sends(then="close"), 502, "closed the connection"),
        (sends(then="hang"), 504, "no byte of an answer within 0.2 s (timeouts.first_byte_s)"),
        (sends(stream(), then="hang"), 504, "no byte of an answer within 0.2 s"),
    ],
)
def test_fault_before_the_first_event_is_a_plain_error(behave: Any, status: int, message: str) -> None:
    async def check() -> None:
        upstream = Upstream(behave)
        async with served(upstream, first_byte_s=0.2) as server:
            found = await server.error(stream=True)
            assert found[:2] == (status, "upstream_error" if status == 502 else "upstream_timeout")
            assert message in found[2]
            assert "127.0.0.1" not in found[2], "addresses stay here"
            server.check_no_leak()

    run(check())


# threat: an upstream server: an answer that breaks or lies ends as an error, also within a stream
@pytest.mark.parametrize(
    ("parts", "then", "message"),
    [
        ((stream(EVENT, EVENT[:20]),), "close", "closed the connection"),
        ((stream(EVENT, EVENT[:20]),), "reset", "closed the connection"),
        ((stream(EVENT, EVENT[:20], b""),), "keep", "ended within an event"),
        ((stream(EVENT), b"xyz\r\n"), "keep", "not HTTP"),
        ((stream(EVENT),), "hang", "sent nothing for 0.2 s in its answer"),
    ],
)
def test_fault_within_a_stream_is_an_error_event_and_the_end(
    parts: Any, then: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half an event is not passed on, and the connection ends after the error."""
    if then == "hang":
        for module in (http_attempt, http_backend):
            monkeypatch.setattr(module, "IDLE_TIMEOUT_S", 0.2)

    async def check() -> None:
        # Half a second between the parts is a busy machine's, and not what is judged here.
        async with served(Upstream(sends(*parts, then=then))) as server:
            body = await server.broken_stream()
            assert body.startswith(chunk(EVENT))
            [_, event, end] = body[len(chunk(EVENT)) :].split(b"\r\n")
            assert end == b""
            assert event.startswith(b"event: error\ndata: ")
            error = msgspec.json.decode(event.removeprefix(b"event: error\ndata: ").strip())["error"]
            assert message in error["message"]
            await until(lambda: server.stats.models[0].total("failed") == 1)
            server.check_no_leak()

    run(check())


def test_answer_that_breaks_off_without_events_is_cut_off() -> None:
    """Of a long answer parts have been sent; the client sees that it is incomplete."""
    long = b"x" * (2 << 20)

    async def check() -> None:
        head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(long) + 9}\r\n\r\n".encode()
        upstream = Upstream(sends(head + long, then="close"))
        async with served(upstream) as server:
            with pytest.raises(aiohttp.ClientPayloadError):
                await server.ask()
            upstream.behave = sends(answer(long))
            assert await server.ask() == (200, long)
            upstream.behave = sends(answer(WHOLE)[:-3], then="close")
            assert (await server.error())[:2] == (502, "upstream_error")
            server.check_no_leak()

    run(check())


def test_request_takes_no_longer_than_its_limit() -> None:
    async def trickle(_upstream: Upstream, writer: asyncio.StreamWriter, _received: Received) -> None:
        writer.write(stream())
        while True:
            writer.write(chunk(EVENT))
            await asyncio.sleep(0.02)

    async def check() -> None:
        upstream = Upstream(trickle)
        async with served(upstream, timeout_s=0.3) as server:
            body = await server.broken_stream()
            assert b"longer than 0.3 s (--request-timeout, or timeouts.request_s of a fleet)" in body
            await until(lambda: upstream.closed >= 1)

    run(check())


# --- clients


@pytest.mark.slow
@pytest.mark.parametrize("part", ["connecting", "silent", "unstreamed", "half an answer", "streaming", "full"])
def test_disconnect_ends_the_upstream(part: str) -> None:
    """Before the first byte, within the stream, and where the client had stopped to read."""

    async def flood(_upstream: Upstream, writer: asyncio.StreamWriter, _received: Received) -> None:
        writer.write(stream())
        while True:
            writer.write(chunk(EVENT * 200))
            await writer.drain()

    behave = {
        "half an answer": sends(answer(WHOLE)[:-3], then="hang"),
        "streaming": sends(stream(EVENT), then="hang"),
        "full": flood,
    }

    async def check() -> None:
        upstream = Upstream(behave.get(part, sends(then="hang")))
        async with served(upstream) as server:
            if part == "connecting":  # an address that takes no connections: the backlog is full
                full = socket.socket()
                full.bind(("127.0.0.1", 0))
                full.listen(0)
                fillers = [socket.socket() for _ in range(3)]
                for each in fillers:
                    each.setblocking(False)
                    each.connect_ex(full.getsockname())
                server.backend.replicas[0]._port = full.getsockname()[1]
            _reader, writer = await server.open(stream=part not in ("unstreamed", "half an answer"))
            await until(lambda: server.stats.models[0].total("in_flight") == 1)
            await until(lambda: part == "connecting" or upstream.received)
            await asyncio.sleep(0.1)  # for what it has sent to arrive, and to fill the buffers
            num_closed = upstream.closed
            writer.transport.abort()
            await until(lambda: server.stats.models[0].total("in_flight") == 0)
            if part != "connecting":
                await until(lambda: upstream.closed > num_closed)
            server.check_no_leak()
            assert server.stats.models[0].total("aborted") == 1

    run(check())


def test_slow_client_slows_the_upstream() -> None:
    """Unread bytes are bounded: the upstream cannot write more than buffers hold; the client gets all in the end."""
    total = 64 << 20
    written = 0

    async def flood(_upstream: Upstream, writer: asyncio.StreamWriter, _received: Received) -> None:
        nonlocal written
        block = EVENT * 1000
        writer.write(stream())
        while written < total:
            writer.write(chunk(block))
            await writer.drain()
            written += len(block)
        writer.write(END)

    async def check() -> None:
        async with served(Upstream(flood)) as server:
            async with server.post(stream=True) as response:
                stalled = -1
                while written != stalled or not written:
                    stalled = written
                    await asyncio.sleep(0.3)
                assert stalled < total / 2, "the upstream waits"
                [exchange] = (child.ticket for child in server.backend.tickets)
                assert exchange.connection is not None
                assert exchange.connection._unread_bytes <= MAX_UNREAD_BYTES + (256 << 10)
                size = 0
                async for data in response.content.iter_any():
                    size += len(data)
            assert size == written >= total
            server.check_no_leak()

    run(check())


# --- replicas


def test_connections_are_kept_and_a_closed_one_is_replaced() -> None:
    async def check() -> None:
        upstream = Upstream(sends(answer(WHOLE)))
        async with served(upstream, health_interval_s=60.0) as server:
            before = upstream.connections
            for _ in range(5):
                assert (await server.ask())[0] == 200
            assert upstream.connections == before + 1
            upstream.behave = sends(then="close")  # as a server does whose keep-alive time is over
            num_served = 0

            async def close_once(_upstream: Upstream, writer: asyncio.StreamWriter, _received: Received) -> None:
                nonlocal num_served
                num_served += 1
                if num_served == 1:
                    writer.close()
                else:
                    writer.write(answer(WHOLE))

            upstream.behave = close_once
            assert (await server.ask())[0] == 200
            assert num_served == 2
            assert server.backend.replicas[0].breaker._failures == 0, "not a failure of the server"
            server.check_no_leak()

    run(check())


def test_retry_only_before_the_first_byte_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request has a connection of its own: on one that was kept, a close is no failure of the server."""
    monkeypatch.setattr(http_replica.UpstreamReplica, "release", lambda _, connection: connection.abort())

    async def check() -> None:
        bad, good = Upstream(sends(then="close")), Upstream(sends(stream(EVENT, DONE, b"")))
        async with served(bad, good) as server:
            for _ in range(4):
                assert await server.ask(stream=True) == (200, EVENT + DONE)
            assert len(good.received) == 4
            assert 1 <= len(bad.received) <= 4
            bad.behave = sends(answer(b'{"error":{}}', status="503 Busy"))
            for _ in range(4):
                assert await server.ask(stream=True) == (200, EVENT + DONE)
            num_bad, num_good = len(bad.received), len(good.received)
            bad.behave = good.behave = sends(stream(EVENT), then="close")
            assert b"event: error" in await server.broken_stream()
            assert len(bad.received) + len(good.received) == num_bad + num_good + 1, "what has begun is not repeated"
            bad.behave = good.behave = sends(then="close")
            num_requests = len(bad.received) + len(good.received)
            assert (await server.error(stream=True))[:2] == (502, "upstream_error")
            assert len(bad.received) + len(good.received) == num_requests + 2, "one retry"
            server.check_no_leak()

    run(check())


def test_time_limit_is_not_retried() -> None:
    async def check() -> None:
        slow = [Upstream(sends(then="hang")), Upstream(sends(then="hang"))]
        async with served(*slow, first_byte_s=0.1) as server:
            assert (await server.error())[0] == 504
            assert sum(len(each.received) for each in slow) == 1

    run(check())


def test_refusal_of_every_replica_comes_through() -> None:
    async def check() -> None:
        body = b'{"error":{"message":"full"}}'
        refusal = answer(body, status="429 Too Many Requests").replace(b"\r\n\r\n", b"\r\nRetry-After: 7\r\n\r\n", 1)
        async with served(Upstream(sends(refusal)), Upstream(sends(refusal))) as server, server.post() as response:
            assert (response.status, await response.read()) == (429, body)
            assert response.headers["retry-after"] == "7"

    run(check())


def test_two_replicas_share_by_open_requests() -> None:
    async def check() -> None:
        release = asyncio.Event()

        async def wait(_upstream: Upstream, writer: asyncio.StreamWriter, _received: Received) -> None:
            await release.wait()
            writer.write(answer(WHOLE))

        upstreams = [Upstream(wait), Upstream(wait)]
        async with served(*upstreams) as server:
            requests = [asyncio.create_task(server.ask()) for _ in range(40)]
            await until(lambda: sum(len(each.received) for each in upstreams) == 40)
            assert [len(each.received) for each in upstreams] == [20, 20]
            upstreams[0].behave = sends(answer(WHOLE))  # free immediately, while the other keeps its 20
            release.set()
            await asyncio.gather(*requests)
            release.clear()
            requests = [asyncio.create_task(server.ask()) for _ in range(2)]
            await until(lambda: len(upstreams[1].received) == 21)
            for _ in range(6):
                await server.ask()
            assert len(upstreams[1].received) == 21, "the busy one gets none"
            release.set()
            await asyncio.gather(*requests)
            server.check_no_leak()

    run(check())


def test_breaker_opens_and_a_probe_closes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_replica, "BREAKER_FAILURES", 3)
    monkeypatch.setattr(http_replica, "BREAKER_OPEN_S", 0.2)

    async def check() -> None:
        upstream = Upstream(sends(then="close"))
        async with served(upstream) as server:
            for _ in range(3):
                assert (await server.error())[0] == 502
            num_requests = len(upstream.received)
            status, code, message = await server.error()
            assert (status, code) == (503, "not_ready")
            assert "failed 3 times in a row" in message
            assert len(upstream.received) == num_requests, "open: nothing is sent"
            await asyncio.sleep(0.25)
            assert (await server.error())[0] == 502, "the probe"
            assert (await server.error())[0] == 503, "open again after one failure"
            upstream.behave = sends(answer(WHOLE))
            await asyncio.sleep(0.25)
            assert [(await server.ask())[0] for _ in range(5)] == [200] * 5
            server.check_no_leak()

    run(check())


def test_health_follows_the_upstream() -> None:
    async def check() -> None:
        upstream = Upstream(sends(answer(WHOLE)))
        await upstream.start()
        port = int(upstream.url.rpartition(":")[2])
        async with served(upstream) as server:
            assert (await server.ask())[0] == 200
            upstream.health = answer(b"{}", status="503 Loading")
            await until(lambda: server.backend.health.problem() is not None)
            assert "/health answers with status 503" in (await server.error())[2]
            async with server.session.get(server.url + "/health") as response:
                assert response.status == 503
            upstream.health = answer(b"{}")
            await until(lambda: server.backend.health.problem() is None)
            await upstream.stop()
            await until(lambda: server.backend.health.problem() is not None)
            status, _, message = await server.error()
            assert status == 503
            assert "cannot be connected to" in message
            await upstream.start(port)
            await until(lambda: server.backend.health.problem() is None)
            assert (await server.ask())[0] == 200

    run(check())


def test_health_and_metrics_count_the_replicas_that_answer() -> None:
    async def check() -> None:
        first, second = Upstream(sends(answer(WHOLE))), Upstream(sends(answer(WHOLE)))
        await first.start()
        await second.start()
        async with served(first, second) as server:
            stats = server.backend.stats

            async def counts() -> tuple[object, object]:
                async with server.session.get(server.url + "/health") as response:
                    health = await response.json()
                [family] = [
                    each
                    for each in Metrics(ServerStats(()), lambda: {"m": stats}).collect()
                    if each.name == "meltcore:replicas"
                ]
                return health.get("replicas"), family.samples[0].value

            await until(lambda: stats.num_serving() == 2)
            assert await counts() == ("2 of 2", 2)
            await second.stop()
            await until(lambda: stats.num_serving() == 1)
            assert await counts() == ("1 of 2", 1)
            assert stats.live_replicas() == [0, 1], "the supervisor has closed none"

    run(check())


def test_requests_that_are_not_forwarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_backend, "MAX_CONNECTIONS", 1)

    async def check() -> None:
        upstream = Upstream(sends(answer(WHOLE)))
        async with served(upstream) as server:
            assert (await server.error(model="other"))[:2] == (404, "model_not_found")
            assert (await server.error(path="/v1/embeddings"))[0] == 400
            assert (await server.ask("/v1/nothing"))[0] == 404
            async with server.session.post(server.url + CHAT, data=b"{") as response:
                assert response.status == 400
            assert upstream.received == []
            upstream.behave = sends(then="hang")
            first = asyncio.create_task(server.ask())
            await until(lambda: len(upstream.received) == 1)
            assert (await server.error())[:2] == (429, "queue_full")
            first.cancel()
            async with server.session.get(server.url + "/v1/models") as response:
                [card] = (await response.json())["data"]
            assert (card["id"], card["owned_by"], card["replicas"]) == ("m", "foreign", 1)
            assert (card["task"], card["priority"]) == ("generation", "standard")

    run(check())


def test_open_requests_end_at_a_drain() -> None:
    from meltcore.common.errors import RequestError

    async def check() -> None:
        upstream = Upstream(sends(then="hang"))
        async with served(upstream) as server:
            waiting = asyncio.create_task(server.error())
            await until(lambda: len(upstream.received) == 1)
            server.backend.end_all(RequestError("going down", status=503, code="server_stopping"), "aborted")
            assert await waiting == (503, "server_stopping", "going down")
            server.check_no_leak()

    run(check())


def test_card_and_metrics_name_the_task_and_its_paths() -> None:
    url = "http://127.0.0.1:1"
    for path, task in (
        ("/v1/chat/completions", "generation"),
        ("/v1/translate", "translation"),
        ("/v1/audio/transcriptions", "transcription"),
        ("/v1/audio/speech", "synthesis"),
    ):
        stats = ServerStats().models[0]
        settings: Any = {"limits": LimitsSection(), "timeouts": TimeoutsSection()}
        backend = HttpBackend("m", ModelSection(url=url, task=task), (url,), stats, **settings)
        card = backend.model_card("m")
        assert (card["task"], stats.task) == (task, task)
        assert path in card["paths"]
        others = ModelSection(url=url, task=task, paths=("/v1/embeddings",))
        assert HttpBackend("m", others, (url,), stats, **settings).model_card("m")["paths"] == ["/v1/embeddings"]
