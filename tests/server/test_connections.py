"""What a connection may do to the server: offer another protocol, send heads without end, or nothing more."""

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from server_harness import MODEL, WAIT_S, RunningServer, scripted_server

from meltcore.server import http_server
from meltcore.server.counts import Counts
from meltcore.server.http import read_body, send_bytes

BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running
        running.check_no_leak()
        assert "Traceback" not in running.stderr


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)


def read_answer(connection: socket.socket) -> bytes:
    """One answer, by its content-length."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536) or pytest.fail(f"closed after {data!r}")
    head, _, rest = data.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    assert length is not None
    while len(rest) < int(length[1]):
        rest += connection.recv(65536)
    return head + b"\r\n\r\n" + rest


@pytest.mark.parametrize("framing", ["length", "chunked"])
def test_a_client_that_offers_http2_is_answered_by_http1(server: RunningServer, framing: str) -> None:
    """As Java's HttpClient does with its first request, and `curl --http2` with each."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk\r\n"
    if framing == "length":
        request = POST + offer + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    else:
        request = POST + offer + b"transfer-encoding: chunked\r\n\r\n%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n"
    with connect(server) as connection:
        for _ in range(2):  # the connection goes on as it is
            connection.sendall(request)
            head, _, body = read_answer(connection).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200")
            assert json.loads(body)["usage"]["completion_tokens"] == 3


def test_a_header_cut_in_two_stays_as_it_was_sent(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(POST + b"x-request-id: abc\r\nUpgrade: h2")
        assert server.request("GET", "/live").status == 200  # the first part has been read by then
        connection.sendall(b"c\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = read_answer(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"x-request-id: abc\r\n" in answer


@pytest.mark.parametrize("piece", [b"x-%d: " + b"v" * 1000 + b"\r\n", b"v" * 1000], ids=["many headers", "one header"])
def test_headers_without_end_are_431(server: RunningServer, piece: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(POST + b"x: ")
        try:
            for _ in range(10_000):  # 10 MB, which nobody may keep
                connection.sendall(piece)
            answer = connection.recv(65536)
        except ConnectionError:
            pass  # closed while we were sending
        else:
            assert answer.startswith(b"HTTP/1.1 431")
            assert str(http_server.MAX_HEAD_BYTES).encode() in answer
    assert server.request("GET", "/health", headers={f"x-{n}": "v" * 1000 for n in range(50)}).status == 200


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application: the body, after a little."""
    body = await read_body(scope, receive, 1000)
    await asyncio.sleep(0.3)
    await send_bytes(send, body, b"text/plain")


@pytest.mark.parametrize(
    ("sent", "stays"),
    [
        (b"", False),
        (POST, False),
        (POST + b"content-length: 10\r\n\r\nabc", False),
        (POST + b"content-length: 3\r\n\r\nabc", True),
        (POST + b"content-length: 3\r\n\r\nabc" + POST + b"content-length: 9\r\n\r\nab", False),
    ],
    ids=["nothing", "half a head", "half a body", "a whole request", "half a second request"],
)
def test_a_client_that_does_not_go_on_is_cut_off(monkeypatch: pytest.MonkeyPatch, sent: bytes, stays: bool) -> None:
    monkeypatch.setattr(http_server, "SILENT_LIMIT_S", 0.1)
    monkeypatch.setattr(http_server, "SILENT_LOOK_S", 0.02)

    async def run() -> bytes | None:
        """What came until the connection was cut off; None where it was not."""
        server = http_server.HttpServer(echo, Counts())
        serving = asyncio.create_task(server.serve())
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setblocking(False)
        server.take(theirs)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(sent)
        came = b""
        try:
            async with asyncio.timeout(1.0):
                while data := await reader.read(1000):
                    came += data
        except TimeoutError:
            return None if came.endswith(b"abc") else came
        except ConnectionError:
            pass
        finally:
            writer.close()
            server.stop()
            await serving
        return came

    came = asyncio.run(run())
    assert (came is None) == stays
