"""The life of a server: bind, load, serve, drain, leave. This process is the first front; it starts all others."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvloop

from meltcore.config import ServerConfig
from meltcore.engine.host_memory import use_one_arena
from meltcore.engine.messages import EngineReady, ForgetFront
from meltcore.engine.socket_folder import SocketFolder
from meltcore.errors import ConfigError, MeltcoreError, RequestError
from meltcore.server.banner import Progress, print_listening, print_ready, say
from meltcore.server.board import Board
from meltcore.server.channel import Drain, EndRequests, ReplicaDied
from meltcore.server.counts import Counts, columns
from meltcore.server.front import Front
from meltcore.server.gpus import Place, place_replicas
from meltcore.server.http_server import HttpServer, calm_collector
from meltcore.server.link import socket_folder
from meltcore.server.listener import Acceptor, bind, raise_file_limit
from meltcore.server.model import Model, common_limits, find_checkpoint, load_text
from meltcore.server.replica import ENGINE_COMMAND, Replica
from meltcore.server.routes import build_app
from meltcore.server.stuck import StuckWatch
from meltcore.server.team import Team, board_rows, front_count

DEAD_LINGER_S = 1.0  # the last engine's death is answered and seen at /health for this long before we exit
SAME_SIGNAL_S = 0.25  # `timeout` and process managers signal a process and its group: one wish, two signals
IDLE_POLL_S = 0.02  # while draining
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
    places = place_replicas(config)
    use_one_arena()
    listener = bind(config.host, config.port)
    port = int(listener.getsockname()[1])
    raise_file_limit()
    print_listening(_url(config.host, port))
    if on_bound is not None:
        on_bound(port)
    folder = SocketFolder("server")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_live(config, engine_command, places, folder, listener))
    finally:
        folder.remove()


async def _live(
    config: ServerConfig,
    engine_command: Sequence[str],
    places: Sequence[Place],
    folder: SocketFolder,
    listener: socket.socket,
) -> int:
    return await _Life(config, engine_command, places, folder).run(listener)


class _Life:
    """One run of a server, from bound socket to exit status."""

    def __init__(
        self,
        config: ServerConfig,
        engine_command: Sequence[str],
        places: Sequence[Place],
        folder: SocketFolder,
    ) -> None:
        rows = board_rows(front_count(config))
        counts = Counts(Board(columns(config.dp), rows), replicas=config.dp)
        self._config = config
        self._folder = folder
        self._counts = counts
        self._front = Front(config, counts, lambda message, replica: self._replicas[replica].send(message))
        self._replicas = [
            Replica(
                place.engine,
                engine_command,
                partial(self._front.on_message, replica=number),
                directory=socket_folder(folder.path, number),
                fronts=rows,
                environment=place.environment,
            )
            for number, place in enumerate(places)
        ]
        self._http = HttpServer(build_app(self._front), counts)
        self._team = Team(
            config,
            counts,
            folder.path,
            on_lost=self._on_front_lost,
            on_unreadable=lambda replica, why: self._replicas[replica].fail(why),
        )
        self._stuck = StuckWatch(self._replicas, counts, profiles=config.profile_dir is not None)
        self._stop = asyncio.Event()
        self._stopped_s: float | None = None  # when the first signal came

    async def run(self, listener: socket.socket) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
            loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        acceptor = Acceptor(listener, self._on_connection)
        http = asyncio.create_task(self._http.serve())
        looking = asyncio.create_task(self._stuck.run())
        try:
            return await self._load_and_serve()
        finally:
            looking.cancel()
            await asyncio.gather(*(replica.stop() for replica in self._replicas))
            acceptor.close()
            self._http.stop()
            await asyncio.gather(http, self._team.leave())
            await asyncio.to_thread(self._front.log.close)

    async def _load_and_serve(self) -> int:
        stop = asyncio.create_task(self._stop.wait())
        if not await self._load_or_stop(stop):
            return 0
        died = asyncio.create_task(self._watch_all())
        front_failed = self._team.failed
        any_end: set[asyncio.Future[Any]] = {stop, died, front_failed}
        await asyncio.wait(any_end, return_when=asyncio.FIRST_COMPLETED)
        if front_failed.done():
            say(f"meltcore serve: {front_failed.result()}", sys.stderr)
        if not died.done():
            await self._drain(died)
        if died.done():
            died.result()
            await asyncio.sleep(DEAD_LINGER_S)
            return EXIT_FAILED
        died.cancel()
        return EXIT_FAILED if front_failed.done() else 0

    async def _load_or_stop(self, stop: asyncio.Task[bool]) -> bool:
        """Load, showing progress; False where we were told to stop meanwhile. Raises MeltcoreError."""
        front, progress = self._front, Progress()
        loading = asyncio.create_task(self._load())
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
        print_ready(self._config, model, front_count(self._config))
        calm_collector()
        return True

    async def _load(self) -> Model:
        """Read the text side, start the engine and the other fronts, all at once. Raises MeltcoreError."""
        checkpoint = await asyncio.to_thread(find_checkpoint, self._config)
        starting = asyncio.gather(*(self._start(number) for number in range(len(self._replicas))))
        reading = asyncio.to_thread(load_text, self._config, checkpoint)
        try:
            text, engines, _ = await asyncio.gather(reading, starting, self._team.start())
        except BaseException:
            starting.cancel()  # the text side failed, or we are told to stop: nobody waits for the engines any more
            raise
        engine = common_limits(engines)
        created = int(time.time())
        await self._team.open(engine, created)
        return self._front.open(text, engine, created)

    async def _start(self, number: int) -> EngineReady:
        try:
            return await self._replicas[number].start()
        except MeltcoreError as error:
            if len(self._replicas) == 1:
                raise
            raise ConfigError(f"replica {number}: {error}") from error

    async def _drain(self, died: asyncio.Task[None]) -> None:
        """Refuse new requests, let the open ones finish for a while, then end them."""
        front, limit_s = self._front, self._config.drain_timeout_s
        reason = "the server is going down and takes no new requests"
        front.health.set("draining", reason)
        self._team.tell(Drain(reason))
        front.log.write("draining", open_requests=self._open_requests(), limit_s=limit_s)
        until_s = time.monotonic() + limit_s
        while self._open_requests() and time.monotonic() < until_s and not died.done():
            await asyncio.wait({died}, timeout=IDLE_POLL_S)
        if not died.done() and self._open_requests():
            error = f"the server is going down, and {limit_s:g} s (--drain-timeout) were not enough for this answer"
            front.requests.end_all(RequestError(error, status=503, code="server_stopping"), "aborted")
            self._team.tell(EndRequests(error, 503, "server_stopping", "aborted"))

    async def _watch_all(self) -> None:
        """Until the last replica has died."""
        await asyncio.gather(*(self._watch(number) for number in range(len(self._replicas))))

    async def _watch(self, number: int) -> None:
        """Wait for the death of a replica, and end what it had open; the others, if any, go on."""
        how = await self._replicas[number].wait()
        front, counts = self._front, self._counts
        lost = round(counts.open_requests(number))
        counts.note_death(number)
        why = front.replica_died(number, how)
        self._team.tell(ReplicaDied(number, why))
        self._replicas[number].close_link()
        front.log.write("engine_died", replica=number, why=why, open_requests=lost)
        whose, rest = "the engine", ""
        if counts.replicas > 1:
            whose = f"replica {number}"
            rest = f"; {len(counts.living())} of {counts.replicas} replicas go on without it"
        say(f"meltcore serve: {whose} has died: {why}; {lost} open requests failed{rest}", sys.stderr)

    def _on_sighup(self) -> None:
        """As SIGTERM, but never the second signal that means now: the kernel sends it, and the shell does too."""
        if self._stopped_s is None:
            self._on_signal()

    def _on_signal(self) -> None:
        """The first asks to drain; a second one, later, means now."""
        now_s = asyncio.get_running_loop().time()
        if self._stopped_s is None:
            self._stopped_s = now_s
            self._stop.set()
        if now_s - self._stopped_s < SAME_SIGNAL_S:
            return
        for replica in self._replicas:
            replica.kill()
        self._team.kill()
        self._folder.remove()
        os._exit(EXIT_FORCED)

    def _open_requests(self) -> int:
        """Of all fronts."""
        return round(self._counts.total("in_flight"))

    def _on_connection(self, connection: socket.socket) -> None:
        if not self._team.place(connection):
            self._http.take(connection)

    def _on_front_lost(self, front: int, how: str, open_requests: int) -> None:
        for replica in self._counts.living():
            self._replicas[replica].send(ForgetFront(front))
        self._front.log.write("front_died", front=front, how=how, open_requests=open_requests)
        died = f"front process {front} has died: {how}; {open_requests} open requests failed"
        say(f"meltcore serve: {died}", sys.stderr)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
