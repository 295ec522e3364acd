"""One connection, driven with bytes that are cut anywhere: every request is answered once, in order and in its form."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from hypothesis import given, settings
from hypothesis import strategies as st
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState
from waiting import WAIT_S

from meltcore.common.errors import RequestError
from meltcore.serve.http.http_protocol import MAX_HEAD_BYTES, HttpProtocol
from meltcore.serve.requests.asgi import read_body, send_bytes, send_error
from meltcore.serve.requests.stats import ServerStats

LIMIT_BYTES = 1000
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
OFFERS = [
    b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n",
    b"Upgrade: TLS/1.2, HTTP/1.1\r\nConnection: upgrade\r\n",
    b"connection: keep-alive, Upgrade\r\nUPGRADE:websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    b"Upgrade: h2c\r\nUpgrade: TLS/1.3\r\nConnection: Upgrade\r\n",
    b"Upgrade: h2c\r\n",
    b"Connection: Upgrade\r\n",
]


class Transport:
    """What was written, and whether the connection is closed."""

    def __init__(self) -> None:
        self.written = b""
        self.is_closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.is_closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.is_closed

    def get_extra_info(self, name: str) -> Any:
        return None

    def pause_reading(self) -> None: ...

    resume_reading = pause_reading


async def application(scope: Any, receive: Any, send: Any) -> None:
    """The method and the body; /stream: in events; /unread: a refusal without reading the body."""
    if scope["path"] == "/unread":
        await send_error(send, RequestError("not for you", status=401))
        return
    try:
        body = await read_body(scope, receive, LIMIT_BYTES)
    except RequestError as error:
        await send_error(send, error)
        return
    await asyncio.sleep(0)
    answer = scope["method"].encode() + b" " + body
    if scope["path"] != "/stream":
        await send_bytes(send, answer, b"text/plain")
        return
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
    await send({"type": "http.response.body", "body": b"data: " + answer + b"\n\n", "more_body": True})
    scope["meltcore.connection"].write_chunk(b"data: chunk\n\n")
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def talk(
    pieces: Sequence[bytes], *, pauses: Callable[[int], bool] = lambda index: True, app: Any = application
) -> Transport:
    """What comes back for the pieces. pauses: whether the server answers before the piece with this index arrives."""

    async def run() -> Transport:
        config = uvicorn.Config(app, interface="asgi3", lifespan="off", ws="none", log_config=None)
        config.load()
        transport, protocol = Transport(), HttpProtocol(config, ServerState(), ServerStats())
        protocol.connection_made(transport)
        for index, piece in enumerate(pieces):
            if pauses(index):
                for _ in range(20):
                    await asyncio.sleep(0)
            if not transport.is_closed:
                protocol.data_received(piece)
        for _ in range(100):
            await asyncio.sleep(0)
        is_closed = transport.is_closed
        protocol.connection_lost(None)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*protocol.tasks)
        transport.is_closed = is_closed
        return transport

    return asyncio.run(run())


def request(body: bytes, offer: bytes = b"", *, path: str = "/", chunked: bool = False, version: str = "1.1") -> bytes:
    framing = b"transfer-encoding: chunked" if chunked else b"content-length: %d" % len(body)
    data = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if chunked else body
    return b"POST %b HTTP/%b\r\nHost: localhost\r\n%b%b\r\n\r\n%b" % (
        path.encode(),
        version.encode(),
        offer,
        framing,
        data,
    )


def statuses(transport: Transport) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", transport.written)]


def bodies(transport: Transport) -> list[bytes]:
    """The bodies of answers with a content-length."""
    found, data = [], transport.written
    while data:
        head, _, rest = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None, head
        found.append(rest[: int(length[1])])
        data = rest[int(length[1]) :]
    return found


def cut(data: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


@settings(max_examples=150, deadline=None)
@given(
    requests=st.lists(st.tuples(st.sampled_from([b"", *OFFERS]), st.booleans()), min_size=1, max_size=4),
    places=st.lists(st.integers(0, 2000), max_size=12),
    pauses=st.booleans(),
)
def test_offers_of_other_protocols_are_answered_in_http_1_1_wherever_the_data_is_cut(
    requests: list[tuple[bytes, bool]], places: list[int], pauses: bool
) -> None:
    sent = b"".join(request(b"body %d" % index, *each[:1], chunked=each[1]) for index, each in enumerate(requests))
    transport = talk(cut(sent, places), pauses=lambda index: pauses)
    assert statuses(transport) == [200] * len(requests)
    assert bodies(transport) == [b"POST body %d" % index for index in range(len(requests))]
    assert not transport.is_closed


@pytest.mark.parametrize("offer", OFFERS)
@pytest.mark.parametrize("method", [b"GET", b"HEAD", b"OPTIONS", b"DELETE"])
def test_offer_without_a_body_byte_by_byte(offer: bytes, method: bytes) -> None:
    head = method + b" /any HTTP/1.1\r\nHost: localhost\r\n" + offer + b"\r\n"
    transport = talk([bytes([byte]) for byte in head + request(b"next")])
    assert statuses(transport) == [200, 200]
    assert transport.written.endswith(b"POST next")


def test_offer_that_ends_the_connection_ends_it() -> None:
    transport = talk([request(b"last", b"Connection: Upgrade, close\r\nUpgrade: h2c\r\n") + request(b"never")])
    assert (statuses(transport), transport.is_closed) == ([200], True)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 400),
        (b"GET /stream\r\n\r\n", 400),
        (b"GET http://localhost/\r\n\r\n", 400),
        (b"GET http://[::1/live HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST http://a:99999999/ HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"GET http://[::1/live HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 400),
        (b"GET / HTTP/1.2\r\nHost: a\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nX-Host: a\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\n x: folded\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nx : space\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\nabc", 400),
        (b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\nHost: a\r\nExpect: 200-ok\r\nContent-Length: 3\r\n\r\n", 417),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n", 405),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n", 405),
        (b"GET / HTTP/1.1\r\nHost: a\r\nx: " + b"v" * MAX_HEAD_BYTES * 2, 431),
        (b"GET /" + b"v" * MAX_HEAD_BYTES * 2, 431),
    ],
    ids=lambda value: str(value)[:60],
)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_bytes_that_are_no_request_are_refused_after_the_answers_before_them(
    bad: bytes, status: int, before: int
) -> None:
    sent = b"".join(request(b"%d" % index) for index in range(before)) + bad
    transport = talk([sent[at : at + 30_000] for at in range(0, len(sent), 30_000)], pauses=lambda index: False)
    assert statuses(transport) == [200] * before + [status]
    error = json.loads(bodies(transport)[-1])["error"]
    assert error["type"] in ("invalid_request_error", "server_error")
    assert "object" not in error["message"], "an error of Python"
    last_head = transport.written.rpartition(b"HTTP/1.1")[2]
    assert re.search(rb"x-request-id: \w+", last_head)
    assert transport.is_closed


@pytest.mark.parametrize("offer", [b"", OFFERS[0]])
@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://localhost:8743", "/", b""),
        (b"http://localhost:8743?x=1", "/", b"x=1"),
        (b"http://[::1]?", "/", b""),
        (b"http://localhost/live?x=1", "/live", b"x=1"),
        (b"/live%20?", "/live ", b""),
    ],
)
def test_target_may_be_an_address_also_without_a_path(offer: bytes, target: bytes, path: str, query: bytes) -> None:
    scopes: list[Any] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        scopes.append(scope)
        await application(scope, receive, send)

    sent = b"POST " + target + b" HTTP/1.1\r\nHost: a\r\n" + offer + b"Content-Length: 3\r\n\r\nabc"
    transport = talk([request(b"first") + sent, request(b"last")], app=noting)
    assert bodies(transport) == [b"POST first", b"POST abc", b"POST last"]
    assert (scopes[1]["path"], scopes[1]["query_string"]) == (path, query)


@pytest.mark.parametrize("before", [b"", request(b"first")])
@pytest.mark.parametrize("callback", ["on_url", "on_headers_complete", "on_body"])
def test_fault_of_the_server_while_it_reads_is_500_and_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, before: bytes, callback: str
) -> None:
    original = getattr(HttpToolsProtocol, callback)

    def fail(self: Any, *args: bytes) -> None:
        original(self, *args)
        if self.url.startswith(b"/fail"):
            raise AttributeError("'NoneType' object has no attribute 'decode'")

    monkeypatch.setattr(HttpToolsProtocol, callback, fail)
    transport = talk([before, request(b"x", path="/fail")])
    assert statuses(transport) == ([200, 500] if before else [500])
    assert b"NoneType" not in transport.written
    assert "NoneType" in caplog.text
    assert transport.is_closed


@pytest.mark.parametrize("offer", [b"", OFFERS[0]])
@pytest.mark.parametrize("step", [1_000, 30_000, 10 * MAX_HEAD_BYTES])
@pytest.mark.parametrize(("extra", "status"), [(-200, 200), (200, 431)])
def test_length_of_a_head_is_judged_alike_however_it_arrives(offer: bytes, step: int, extra: int, status: int) -> None:
    long = b"x: " + b"v" * (MAX_HEAD_BYTES + extra - len(request(b"", offer))) + b"\r\n"
    sent = request(b"body", offer + long)
    transport = talk([sent[at : at + step] for at in range(0, len(sent), step)])
    assert statuses(transport) == [status]
    assert transport.is_closed == (status != 200)


@pytest.mark.parametrize("field", [b"Host: b", b"Expect: 200-ok", b"Content-Encoding: gzip", b"Upgrade: h2c"])
@pytest.mark.parametrize("step", [1, 10_000])
def test_trailers_of_a_body_change_nothing(field: bytes, step: int) -> None:
    body = request(b"chunks", chunked=True).removesuffix(b"\r\n") + field + b"\r\nConnection: Upgrade\r\n\r\n"
    sent = body + request(b"next")
    transport = talk([sent[at : at + step] for at in range(0, len(sent), step)], pauses=lambda index: False)
    assert bodies(transport) == [b"POST chunks", b"POST next"]
    assert not transport.is_closed


@pytest.mark.parametrize(("path", "requests"), [("/", 1), ("/", 3), ("/stream", 3), ("/unread", 1), ("/waits", 1)])
def test_memory_of_a_connection_is_free_once_it_has_ended(path: str, requests: int) -> None:
    """Garbage collections are rare here, so that objects that refer to each other would pile up until one."""

    async def ended_connection() -> weakref.ref[HttpProtocol]:
        config = uvicorn.Config(waiting, interface="asgi3", lifespan="off", ws="none", log_config=None)
        config.load()
        transport, protocol = Transport(), HttpProtocol(config, ServerState(), ServerStats())
        protocol.connection_made(transport)
        for _ in range(requests):
            protocol.data_received(request(b"x", path=path))
        for _ in range(30):
            await asyncio.sleep(0)
        transport.close()
        protocol.connection_lost(None)
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*protocol.tasks)
        return weakref.ref(protocol)

    async def waiting(scope: Any, receive: Any, send: Any) -> None:
        if path != "/waits":
            await application(scope, receive, send)
        while path == "/waits" and (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> bool:
        connection = await ended_connection()
        for _ in range(3):
            await asyncio.sleep(0)
        return connection() is None

    gc.disable()
    try:
        assert asyncio.run(run())
    finally:
        gc.enable()


# --- HTTP/1.0


@pytest.mark.parametrize("connection", [b"", b"Connection: close\r\n", b"Connection: Keep-Alive\r\n"])
def test_stream_to_http_1_0_has_no_chunk_sizes_and_ends_with_the_connection(connection: bytes) -> None:
    transport = talk([request(b"x", connection, path="/stream", version="1.0")])
    head, _, body = transport.written.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head
    assert body == b"data: POST x\n\ndata: chunk\n\ndata: [DONE]\n\n"
    assert transport.is_closed


def test_stream_to_http_1_1_has_chunk_sizes() -> None:
    transport = talk([request(b"x", path="/stream"), request(b"next")])
    assert b"transfer-encoding: chunked" in transport.written
    assert b"\r\nd\r\ndata: chunk\n\n\r\n" in transport.written
    assert statuses(transport) == [200, 200]


@pytest.mark.parametrize("host", [b"Host: localhost\r\n", b""])
def test_http_1_0_stays_open_only_where_the_client_says_so(host: bytes) -> None:
    kept = b"GET / HTTP/1.0\r\n" + host + b"Connection: keep-alive\r\n\r\n"
    transport = talk(
        [kept, kept, b"HEAD / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", b"GET / HTTP/1.0\r\n\r\n", kept]
    )
    assert statuses(transport) == [200] * 4
    heads = transport.written.split(b"HTTP/1.1 200")[1:]
    assert [b"connection: keep-alive" in head for head in heads] == [True, True, True, False]
    assert [b"connection: close" in head for head in heads] == [False, False, False, True]
    assert transport.is_closed


# --- Expect: 100-continue


EXPECT = b"Expect: 100-continue\r\n"


def announced(size: int, path: str = "/", version: str = "1.1", expect: bytes = EXPECT) -> bytes:
    return b"POST %b HTTP/%b\r\nHost: localhost\r\n%bContent-Length: %d\r\n\r\n" % (
        path.encode(),
        version.encode(),
        expect,
        size,
    )


@pytest.mark.parametrize("expect", [EXPECT, b"expect: 100-CONTINUE \r\n"])
def test_announced_body_is_asked_for_once(expect: bytes) -> None:
    transport = talk([announced(3, expect=expect)])
    assert transport.written == CONTINUE
    transport = talk([announced(3, expect=expect), b"a", b"bc", request(b"next")])
    assert transport.written.startswith(CONTINUE)
    assert bodies_after_continue(transport) == [b"POST abc", b"POST next"]


def bodies_after_continue(transport: Transport) -> list[bytes]:
    assert transport.written.count(b" 100 ") == 1
    transport.written = transport.written.removeprefix(CONTINUE)
    return bodies(transport)


@pytest.mark.parametrize(
    ("head", "status"), [(announced(LIMIT_BYTES + 1), 413), (announced(10**12), 413), (announced(3, "/unread"), 401)]
)
def test_announced_body_is_refused_before_it_is_sent(head: bytes, status: int) -> None:
    transport = talk([head])
    assert statuses(transport) == [status]
    assert b"connection: close" in transport.written
    assert transport.is_closed


def test_announced_body_that_comes_with_its_head_is_not_asked_for() -> None:
    transport = talk([announced(3) + b"abc", request(b"next")], pauses=lambda index: index > 0)
    assert bodies(transport) == [b"POST abc", b"POST next"]
    transport = talk([announced(0) + request(b"next")])
    assert bodies(transport) == [b"POST ", b"POST next"]


def test_expectation_of_a_pipelined_request_waits_for_its_turn() -> None:
    transport = talk([request(b"first") + announced(3)], pauses=lambda index: False)
    assert statuses(transport) == [200, 100]
    assert transport.written.endswith(b"POST first" + CONTINUE)


def test_http_1_0_is_never_sent_100() -> None:
    transport = talk([announced(3, version="1.0"), b"abc"])
    assert statuses(transport) == [200]
    assert bodies(transport) == [b"POST abc"]


@settings(max_examples=60, deadline=None)
@given(places=st.lists(st.integers(0, 300), max_size=8))
def test_announced_body_arrives_wherever_the_data_is_cut(places: list[int]) -> None:
    transport = talk(cut(announced(3) + b"abc" + request(b"next"), places))
    transport.written = transport.written.replace(CONTINUE, b"", 1)
    assert bodies(transport) == [b"POST abc", b"POST next"]
