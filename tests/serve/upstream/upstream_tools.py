"""An upstream whose bytes a test chooses, and the real HTTP API over it, in one process and event loop."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import aiohttp
import msgspec
from server_harness import configure
from waiting import WAIT_S, until

from meltcore.serve.http.http_server import HttpServer
from meltcore.serve.requests.backend import ModelTable
from meltcore.serve.requests.keys import ApiKeys
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ServerStats
from meltcore.serve.requests.tracing import Tracing
from meltcore.serve.routes import build_app
from meltcore.serve.upstream.http_backend import HttpBackend
from meltcore.settings.fleet_spec import KeySection, LimitsSection, ModelSection, TimeoutsSection

SSE = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHAT = "/v1/chat/completions"
EVENT = b'data: {"choices":[{"delta":{"content":" w"}}]}\n\n'
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def answer(body: bytes, *, status: str = "200 OK", content_type: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def stream(*events: bytes) -> bytes:
    return SSE.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(map(chunk, events))


class Received(NamedTuple):
    """A request as the upstream got it."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


Behavior = Callable[["Upstream", asyncio.StreamWriter, Received], Awaitable[None]]


class Upstream:
    """A server that answers GET with `health`, and every POST by `behave`."""

    def __init__(self, behave: Behavior) -> None:
        self.behave = behave
        self.health = answer(b"{}")
        self.received: list[Received] = []
        self.connections = 0
        self.closed = 0  # connections that have ended
        self.url = ""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                if head[0].startswith("GET"):
                    writer.write(self.health)
                    continue
                self.received.append(Received(head[0], headers, body))
                gone = asyncio.ensure_future(reader.read(1))
                work = asyncio.ensure_future(self.behave(self, writer, self.received[-1]))
                await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():  # the client is gone
                    work.cancel()
                    break
                work.result()
                gone.cancel()
                await asyncio.wait({gone})
                if writer.is_closing():
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._tasks.discard(task)
            self.closed += 1
            writer.close()


def sends(*parts: bytes, then: str = "keep") -> Behavior:
    """Send the parts, each in a write of its own; then "keep" the connection, "close", "reset" or "hang"."""

    async def behave(_upstream: Upstream, writer: asyncio.StreamWriter, _received: Received) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()
            if len(parts) > 1:
                await asyncio.sleep(0.002)  # a read of its own
        if then == "close":
            writer.close()
        elif then == "reset":
            await asyncio.sleep(0.02)  # what was sent arrives before the reset
            writer.transport.abort()
        elif then == "hang":
            await asyncio.Event().wait()  # until the test ends, or the client has gone

    return behave


class Served:
    """The HTTP API with one upstream model, and a client."""

    def __init__(
        self, backend: HttpBackend, url: str, session: aiohttp.ClientSession, stats: ServerStats, log: io.StringIO
    ) -> None:
        self.log = log
        self.backend = backend
        self.url = url
        self.session = session
        self.stats = stats

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def post(self, path: str = CHAT, *, stream: bool = False, **fields: Any) -> Any:
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
        return self.session.post(self.url + path, json=body | ({"stream": True} if stream else {}))

    async def open(self, path: str = CHAT, *, stream: bool = True) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request over a raw connection, and leave the answer unread."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1024)
        body = b'{"model":"m","stream":true}' if stream else b'{"model":"m"}'
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    async def ask(self, path: str = CHAT, **fields: Any) -> tuple[int, bytes]:
        async with self.post(path, **fields) as response:
            return response.status, await response.read()

    async def log_lines(self, count: int) -> list[Any]:
        """The lines of the log, once there are `count`."""
        await until(lambda: self.log.getvalue().count("\n") >= count)
        return [msgspec.json.decode(line) for line in self.log.getvalue().splitlines()]

    async def broken_stream(self) -> bytes:
        """The body, chunks and all, of a stream that ends without its last chunk."""
        reader, writer = await self.open()
        received = await asyncio.wait_for(reader.read(), WAIT_S)  # to the end of the connection
        writer.close()
        head, _, body = received.partition(b"\r\n\r\n")
        assert b" 200 OK" in head
        assert not body.endswith(b"0\r\n\r\n")
        return body

    async def error(self, **fields: Any) -> tuple[int, str, str]:
        """Status, code and message of an answer in OpenAI's error form."""
        status, body = await self.ask(**fields)
        error = msgspec.json.decode(body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error["code"], error["message"]

    def check_no_leak(self) -> None:
        """Nothing is open, and every accepted request has an outcome."""
        model = self.stats.models[0]
        assert model.total("in_flight") == 0
        assert sum(model.open_requests(each.index) for each in self.backend.replicas) == 0
        assert [each.num_open for each in self.backend.replicas] == [0] * len(self.backend.replicas)
        assert model.total("accepted") == sum(model.total(name) for name in ("finished", "aborted", "failed"))


@asynccontextmanager
async def served(
    *upstreams: Upstream | str,
    timeout_s: float = 60.0,
    tracing: Tracing | None = None,
    api_keys: Sequence[KeySection] = (),
    **settings: Any,
) -> AsyncIterator[Served]:
    """The API over upstreams, which are started here unless they are addresses, on a socket of its own."""
    for upstream in upstreams:
        if isinstance(upstream, Upstream) and not upstream.url:
            await upstream.start()
    urls = tuple(each if isinstance(each, str) else each.url for each in upstreams)
    times = {name: settings.pop(name) for name in ("first_byte_s", "health_interval_s") if name in settings}
    timeouts = TimeoutsSection(request_s=timeout_s, **({"health_interval_s": 0.05} | times))
    upstream = ModelSection(url=urls[0], **settings)
    config = configure({"m": upstream}, request_timeout_s=timeout_s).spec
    stats, lines = ServerStats([len(urls)], keys=len(api_keys)), io.StringIO()
    log = Log("json", stats, lines)
    backend = HttpBackend("m", upstream, urls, stats.models[0], limits=LimitsSection(), timeouts=timeouts)
    backend.health.set("ready", "ready")
    backend.start()
    keys, metrics = ApiKeys(api_keys, stats), Metrics(stats, dict)
    http = HttpServer(build_app(ModelTable([backend]), config, metrics, log, keys, tracing), stats)
    serving = asyncio.create_task(http.serve())

    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listener.setblocking(False)
    accepting = asyncio.create_task(_accept(listener, http))
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        await until(
            lambda: all(
                each.state != "starting" or each.reason != "it has not answered yet" for each in backend.replicas
            )
        )
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(WAIT_S)) as session:
            yield Served(backend, url, session, stats, lines)
    finally:
        accepting.cancel()
        listener.close()
        http.stop()
        backend.close()
        await serving
        for upstream in upstreams:
            if isinstance(upstream, Upstream):
                await upstream.stop()
        log.close()


async def _accept(listener: Any, http: HttpServer) -> None:
    while True:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        http.add_connection(connection)
