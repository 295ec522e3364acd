"""Unusual connections: another protocol, endless heads, or no further data."""

import asyncio
import json
import re
import resource
import socket
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import pytest
from server_harness import MODEL, RunningServer, scripted_server
from waiting import WAIT_S, until, wait_until

from meltcore.serve.http import http_protocol, http_server
from meltcore.serve.http.listener import raise_file_limit
from meltcore.serve.requests.asgi import read_body, send_bytes
from meltcore.serve.requests.stats import ServerStats

BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 3}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"


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
def test_http2_upgrade_offer_is_answered_by_http1(server: RunningServer, framing: str) -> None:
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


def test_head_is_answered_on_a_connection_that_stays_open(server: RunningServer) -> None:
    with closing(server.connect(5)) as connection:
        for path, status in (("/health", 200), ("/", 200), ("/docs", 200), ("/none", 404), ("/v1/completions", 405)):
            connection.request("HEAD", path)
            answer = connection.getresponse()
            assert (answer.status, answer.read()) == (status, b""), path


def test_header_split_over_two_packets_is_unchanged(server: RunningServer) -> None:
    with connect(server) as connection:
        connection.sendall(POST + b"x-request-id: abc\r\nUpgrade: h2")
        assert server.request("GET", "/live").status == 200  # the first part has been read by then
        connection.sendall(b"c\r\ncontent-length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = read_answer(connection)
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"x-request-id: abc\r\n" in answer


# threat: a client: a head without an end is 431
@pytest.mark.parametrize("piece", [b"x-%d: " + b"v" * 1000 + b"\r\n", b"v" * 1000], ids=["many headers", "one header"])
def test_headers_without_end_are_431(server: RunningServer, piece: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(POST + b"x: ")
        try:
            for _ in range(10_000):  # 10 MB, which must not be buffered
                connection.sendall(piece)
            answer = connection.recv(65536)
        except ConnectionError:
            pass  # closed while we were sending
        else:
            assert answer.startswith(b"HTTP/1.1 431")
            assert str(http_protocol.MAX_HEAD_BYTES).encode() in answer
    assert server.request("GET", "/health", headers={f"x-{n}": "v" * 1000 for n in range(50)}).status == 200


async def echo(scope: Any, receive: Any, send: Any) -> None:
    """An application: the body, after a little."""
    body = await read_body(scope, receive, 1000)
    await asyncio.sleep(0.3)
    await send_bytes(send, body, b"text/plain")


@pytest.mark.slow
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
def test_stalled_request_head_is_disconnected(monkeypatch: pytest.MonkeyPatch, sent: bytes, stays: bool) -> None:
    answer = exchange(monkeypatch, sent, stays=stays, SILENT_LIMIT_S=0.1)
    assert (answer is None) == stays
    is_late = sent.startswith(POST) and sent.count(POST) == 1 and not stays
    assert (answer or b"").startswith(b"HTTP/1.1 408 Request Timeout\r\n") == is_late


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "piece", "stays"),
    [
        (b"", b"\r\n", False),
        (POST, b"x: y\r\n", False),
        (POST + b"content-length: 1000\r\n\r\n", b"a", False),
        (POST + b"content-length: 3\r\n\r\nabc", b"\r\n", False),
        (POST + b"content-length: 12\r\n\r\n", b"abc", True),
    ],
    ids=["empty lines", "head", "body", "empty lines after a request", "a slow whole request"],
)
def test_slowly_sent_request_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, piece: bytes, stays: bool
) -> None:
    pieces = [piece] * (4 if stays else 100_000)
    answer = exchange(monkeypatch, sent, pieces, stays=stays, HEAD_LIMIT_S=0.5, REQUEST_LIMIT_S=0.7)
    assert (answer is None) == stays
    limit = {b"x: y\r\n": "the request's headers took too long to arrive: the limits are 0.5 s, and 60 s without data"}
    limit[b"a"] = "the request's headers and body took too long to arrive: the limits are 0.7 s, and 60 s without data"
    if piece in limit:
        assert answer is not None
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert json.loads(body)["error"] == {
            "message": limit[piece],
            "type": "timeout_error",
            "param": None,
            "code": "request_timeout",
        }
    elif not stays:
        assert b"408" not in (answer or b"")


def exchange(
    monkeypatch: pytest.MonkeyPatch, sent: bytes, pieces: Sequence[bytes] = (), *, stays: bool, **limits_s: float
) -> bytes | None:
    """The data received until the server disconnects. `pieces` are sent every 20 ms.

    Where the client stays connected, it sends all before the limits are 0, and the server has looked at it since: None.
    """
    checks: list[bool] = []
    is_late = http_protocol.HttpProtocol.is_late

    def noted_is_late(self: Any, now_s: float) -> bool:
        checks.append(is_late(self, now_s))
        return checks[-1]

    def set_limits(found_s: dict[str, float]) -> None:
        for name, limit_s in found_s.items():
            monkeypatch.setattr(http_protocol, name, limit_s)

    async def send_pieces(connection: socket.socket) -> None:
        with suppress(ConnectionError):  # closed by the server, whose response can still be read
            for piece in pieces:
                await asyncio.sleep(0.02)
                await asyncio.get_running_loop().sock_sendall(connection, piece)

    async def receive(connection: socket.socket) -> bytes | None:
        came = b""
        with suppress(ConnectionError):
            while data := await asyncio.get_running_loop().sock_recv(connection, 1000):
                came += data
                if stays and came.endswith(b"abc"):
                    set_limits(dict.fromkeys(limits_s, 0.0))
                    checks.clear()
                    await until(lambda: len(checks) >= 3, "checks for late clients")
                    return came if any(checks) else None
        return came

    monkeypatch.setattr(http_protocol.HttpProtocol, "is_late", noted_is_late)
    monkeypatch.setattr(http_server, "LATE_CHECK_S", 0.02)
    set_limits({} if stays else limits_s)

    async def run() -> bytes | None:
        async with connected(echo) as ours:
            await asyncio.get_running_loop().sock_sendall(ours, sent)
            sending = asyncio.create_task(send_pieces(ours))
            try:
                async with asyncio.timeout(WAIT_S):
                    return await receive(ours)
            finally:
                sending.cancel()

    return asyncio.run(run())


@asynccontextmanager
async def connected(app: Any) -> AsyncIterator[socket.socket]:
    """A client's end of a connection to a server of `app`."""
    server = http_server.HttpServer(app, ServerStats())
    serving = asyncio.create_task(server.serve())
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(False)
    server.add_connection(theirs)
    try:
        yield ours
    finally:
        ours.close()
        server.stop()
        await serving


@pytest.mark.parametrize("body", [b"", b"abc"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/tokenize"])
def test_half_close_is_a_disconnect_on_each_route(body: bytes, path: bytes) -> None:
    ends: list[str] = []

    async def waits(scope: Any, receive: Any, send: Any) -> None:
        await read_body(scope, receive, 1000)
        ends.append((await receive())["type"])

    async def run() -> None:
        async with connected(waits) as ours, asyncio.timeout(WAIT_S):
            loop = asyncio.get_running_loop()
            head = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % (path, len(body))
            await loop.sock_sendall(ours, head + body)
            ours.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(ours, 1000) == b""
            await until(lambda: ends, "the end of the request")

    asyncio.run(run())
    assert ends == ["http.disconnect"]


# threat: a client: one that sends slowly, or nothing, is disconnected, and holds up no other client
@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_clients_that_never_send_do_not_keep_others_waiting(server: RunningServer, count: int) -> None:
    raise_file_limit()
    before = files_at_rest(server)
    request = POST + b"content-length: %d\r\n\r\n" % len(BODY) + BODY
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(server)) for _ in range(count)]
        wait_until(lambda: open_files(server) >= before + count, "all connections are accepted")
        speaking = clients[::10]
        for client in speaking:
            client.sendall(request)
        for client in speaking:
            assert read_answer(client).startswith(b"HTTP/1.1 200")
        for client in (each for index, each in enumerate(clients) if index % 10):
            client.setblocking(False)
            with pytest.raises(BlockingIOError):  # open, and without an answer
                client.recv(1)
    wait_until(lambda: open_files(server) <= before, "all connections are closed")


def files_at_rest(server: RunningServer) -> int:
    """Files that it has open once it has closed the connections of earlier tests: the same number for 0.2 s."""
    counts: list[int] = []

    def settled() -> bool:
        counts.append(open_files(server))
        return len(counts) > 10 and len(set(counts[-10:])) == 1  # polled every 20 ms

    wait_until(settled, "connections of earlier tests are closed")
    return counts[-1]


def open_files(server: RunningServer) -> int:
    return sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in server.api_server_pids())


def test_clients_that_never_send_are_disconnected_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "SILENT_LIMIT_S", 0.3)
    monkeypatch.setattr(http_server, "LATE_CHECK_S", 0.05)
    raise_file_limit()

    async def run() -> int:
        stats = ServerStats()
        server = http_server.HttpServer(echo, stats)
        serving = asyncio.create_task(server.serve())
        pairs = [socket.socketpair() for _ in range(900)]
        for ours, theirs in pairs:
            ours.setblocking(False)
            theirs.setblocking(False)
            server.add_connection(theirs)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(WAIT_S):
            ends = await asyncio.gather(*(loop.sock_recv(ours, 1) for ours, _ in pairs))
        for ours, _ in pairs:
            ours.close()
        server.stop()
        await serving
        return sum(data == b"" for data in ends)

    assert asyncio.run(run()) == 900


@pytest.mark.slow
def test_lack_of_file_descriptors_is_logged_once_per_minute_and_loses_no_connection() -> None:
    with scripted_server() as server:
        pid = server.process.pid
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        # A limit at the lowest free descriptor is not enough: each one closed meanwhile would let a connection through.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))
        clients = [connect(server) for _ in range(5)]
        wait_until(lambda: "event=accept_failed" in server.stderr, "a line about it")
        time.sleep(1.2)  # several more attempts
        assert server.stderr.count("event=accept_failed") == 1
        assert 'error="Too many open files" file_limit=' in server.stderr
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        for client in clients:
            client.sendall(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert client.recv(100).startswith(b"HTTP/1.1 200")
            client.close()
