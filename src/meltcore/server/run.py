"""The life of a server process: bind, load, serve, drain, leave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from meltcore.config import ServerConfig
from meltcore.errors import ConfigError, MeltcoreError, RequestError
from meltcore.server.banner import Progress, print_listening, print_ready
from meltcore.server.front import Front
from meltcore.server.replica import ENGINE_COMMAND
from meltcore.server.routes import build_app

BACKLOG = 16_384  # 10,000 clients may connect in one burst; the kernel caps it at net.core.somaxconn
KEEP_ALIVE_S = 75
UNREAD_LIMIT_S = 120  # a peer that acknowledges nothing for this long is gone
DEAD_LINGER_S = 1.0  # an engine's death is answered and seen at /health for this long before we exit
CLOSE_S = 2  # whole seconds: uvicorn's limit for connections to close
GC_THRESHOLDS = (50_000, 20, 100)  # young objects are requests; collecting every 700 would pause streams for nothing
SAME_SIGNAL_S = 0.25  # `timeout` and process managers signal a process and its group: one wish, two signals
EXIT_FAILED = 1
EXIT_FORCED = 130


def serve(
    config: ServerConfig,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    on_bound: Callable[[int], None] | None = None,
) -> int:
    """Serve until told to stop; returns the exit status. `on_bound` learns the port.

    Raises ConfigError where the server cannot start: the address is taken, the checkpoint or the engine fails.
    """
    listener = _bind(config)
    port = int(listener.getsockname()[1])
    _raise_file_limit()
    print_listening(_url(config.host, port))
    if on_bound is not None:
        on_bound(port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_Life(config, engine_command).run(listener))


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, which also lets the application drop a connection whose client does not read."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["meltcore.transport"] = self.transport  # type: ignore[typeddict-unknown-key]


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: stopping has to drain the engine first."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Life:
    """One run of a server, from bound socket to exit status."""

    def __init__(self, config: ServerConfig, engine_command: Sequence[str]) -> None:
        self._config = config
        self._front = Front(config, engine_command)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build_app(self._front),
                http=_Protocol,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_S,
            )
        )
        self._stop = asyncio.Event()
        self._stopped_s: float | None = None  # when the first signal came

    async def run(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._uvicorn.serve([listener]))
        try:
            return await self._load_and_serve()
        finally:
            await self._front.replica.stop()
            self._uvicorn.should_exit = True
            await http
            await asyncio.to_thread(self._front.log.close)

    async def _load_and_serve(self) -> int:
        front = self._front
        stop = asyncio.create_task(self._stop.wait())
        if not await self._load(stop):
            return 0
        died = asyncio.create_task(front.replica.wait())
        await asyncio.wait({stop, died}, return_when=asyncio.FIRST_COMPLETED)
        if not died.done():
            await self._drain(died)
        if died.done():
            return await self._engine_died(died.result())
        died.cancel()
        return 0

    async def _load(self, stop: asyncio.Task[bool]) -> bool:
        """Load, showing progress; False where we were told to stop meanwhile. Raises MeltcoreError."""
        front, progress = self._front, Progress()
        loading = asyncio.create_task(front.load())
        while not loading.done() and not stop.done():
            progress.show(front.health.reason)
            await asyncio.wait({loading, stop}, timeout=0.2, return_when=asyncio.FIRST_COMPLETED)
        progress.clear()
        if not loading.done():
            front.health.set("draining", "the server is going down")
            loading.cancel()
            return False
        try:
            model = loading.result()
        except MeltcoreError:
            front.health.set("dead", "the model could not be loaded")
            raise
        print_ready(self._config, model)
        # What loading left lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        return True

    async def _drain(self, died: asyncio.Task[str]) -> None:
        """Refuse new requests, let the open ones finish for a while, then end them."""
        front, limit_s = self._front, self._config.drain_timeout_s
        front.health.set("draining", "the server is going down and takes no new requests")
        front.log.write("draining", open_requests=len(front.requests), limit_s=limit_s)
        idle = asyncio.create_task(front.requests.idle())
        await asyncio.wait({idle, died}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if not died.done() and len(front.requests):
            error = f"the server is going down, and {limit_s:g} s (--drain-timeout) were not enough for this answer"
            front.requests.end_all(RequestError(error, status=503, code="server_stopping"), "aborted")

    async def _engine_died(self, how: str) -> int:
        front = self._front
        open_requests = len(front.requests)
        why = front.engine_died(how)
        front.log.write("engine_died", why=why, open_requests=open_requests)
        print(f"meltcore serve: the engine has died: {why}; {open_requests} open requests failed", file=sys.stderr)
        await asyncio.sleep(DEAD_LINGER_S)
        return EXIT_FAILED

    def _on_signal(self) -> None:
        """The first asks to drain; a second one, later, means now."""
        now_s = asyncio.get_running_loop().time()
        if self._stopped_s is None:
            self._stopped_s = now_s
            self._stop.set()
        if now_s - self._stopped_s < SAME_SIGNAL_S:
            return
        self._front.replica.kill()
        self._front.replica.remove_files()
        os._exit(EXIT_FORCED)


def _bind(config: ServerConfig) -> socket.socket:
    """A bound socket, before anything is loaded: a port in use is found out in no time."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _notice_lost_peers(listener)
    try:
        listener.bind((config.host, config.port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot listen on {config.host} port {config.port}: {reason}") from error
    return listener


def _notice_lost_peers(listener: socket.socket) -> None:
    """Let the kernel end connections whose peer is gone without a word, or reads nothing of an answer already written.

    Accepted connections inherit these options (Linux). What is still being generated has its own, smaller bound.
    """
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_LIMIT_S * 1000)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREAD_LIMIT_S)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, UNREAD_LIMIT_S // 4)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    """One file descriptor a connection: take all that the hard limit allows."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
