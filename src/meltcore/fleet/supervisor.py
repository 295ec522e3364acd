"""The supervisor: binds the port, starts, watches and restarts processes, passes connections on, drains.

It serves no requests. Engines and API servers are processes of their own; `meltcore serve` runs one model.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import uvloop

from meltcore.api.backend import ServerStatus
from meltcore.api.http_server import tune_gc
from meltcore.api.log import Log
from meltcore.api.stats import ServerStats
from meltcore.backends.engine_link import socket_folder
from meltcore.backends.engine_process import ENGINE_COMMAND, LocalEngineProcess, common_limits
from meltcore.backends.stuck_watch import StuckWatch
from meltcore.backends.text_model import find_task
from meltcore.config import ServerConfig
from meltcore.errors import ConfigError, MeltcoreError
from meltcore.fleet.channel import EndRequests, LoadText, Open, ReplicaDied, StatusChanged
from meltcore.fleet.console import LoadingProgress, print_line, print_listening, print_ready
from meltcore.fleet.listener import Acceptor, bind, raise_file_limit
from meltcore.fleet.placement import Placement, place_replicas
from meltcore.fleet.worker_pool import WorkerPool, worker_count
from meltcore.host_memory import use_one_arena
from meltcore.protocol.engines import FromEngine, ServedReady, shared_stats
from meltcore.protocol.generation import StepOutputs
from meltcore.protocol.shell import ForgetClient, Loading
from meltcore.protocol.sockets import SocketFolder
from meltcore.protocol.synthesis import SynthesisOutputs
from meltcore.protocol.transcription import TranscriptionOutputs
from meltcore.protocol.translation import TranslationOutputs

DEAD_LINGER_S = 1.0  # the death of the last engine is reported to requests and at /health for this long
SAME_SIGNAL_S = 0.25  # `timeout` and process managers signal a process and its group: one intention, two signals
POLL_S = 0.02  # while draining
PROGRESS_S = 0.2
CANCEL_LIMIT_S = 2.0  # of loading at a signal
EXIT_FAILED = 1
EXIT_FORCED = 130


def serve(
    config: ServerConfig,
    *,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    on_bound: Callable[[int], None] | None = None,
) -> int:
    """Serve until a signal or a failure; returns the exit status. `on_bound` is called with the port.

    Raises ConfigError when the server cannot start: the address is taken, or a checkpoint or an engine fails.
    """
    _check_names(config)
    placements = [place_replicas(model) for model in config.models]
    use_one_arena()
    listener = bind(config.host, config.port)
    port = int(listener.getsockname()[1])
    raise_file_limit()
    print_listening(config.host, port)
    if on_bound is not None:
        on_bound(port)
    folder = SocketFolder("server")
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_supervise(config, engine_command, placements, folder, listener))
    finally:
        folder.remove()


async def _supervise(
    config: ServerConfig,
    engine_command: Sequence[str],
    placements: Sequence[Sequence[Placement]],
    folder: SocketFolder,
    listener: socket.socket,
) -> int:
    return await Supervisor(config, engine_command, placements, folder).run(listener)


class Supervisor:
    """One run of a server, from its bound socket to its exit status."""

    def __init__(
        self,
        config: ServerConfig,
        engine_command: Sequence[str],
        placements: Sequence[Sequence[Placement]],
        folder: SocketFolder,
    ) -> None:
        """Create the engines. `placements`: one per replica, for each model."""
        num_processes = 1 + worker_count(config)
        self._config = config
        self._folder = folder
        self._stats = stats = ServerStats([len(replicas) for replicas in placements], num_processes=num_processes)
        self._log = Log(config.log_format, stats)
        self._engines: list[list[LocalEngineProcess]] = []
        for model, replicas in enumerate(placements):
            first = sum(map(len, self._engines))
            self._engines.append(
                [
                    LocalEngineProcess(
                        placement.engine,
                        engine_command,
                        partial(self._on_engine_message, model, replica),
                        directory=socket_folder(folder.path, first + replica),
                        client_count=num_processes,
                        environment=placement.environment,
                    )
                    for replica, placement in enumerate(replicas)
                ]
            )
        self._pool = WorkerPool(
            config, stats, folder.path, on_lost=self._on_worker_lost, on_unreadable=self._on_unreadable
        )
        self._stop = asyncio.Event()
        self._stopped_s: float | None = None  # when the first signal came
        self._progress = "loading: starting"

    async def run(self, listener: socket.socket) -> int:
        """Load, serve and drain; returns the exit status. Raises MeltcoreError when loading fails."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, self._on_sighup)
        acceptor = Acceptor(listener, self._pool.assign, self._on_exhausted)
        profiles = self._config.profiling
        watches = [
            asyncio.create_task(StuckWatch(engines, stats, profiles=profiles).run())
            for engines, stats in zip(self._engines, self._stats.models, strict=True)
        ]
        try:
            return await self._load_and_serve()
        finally:
            for watch in watches:
                watch.cancel()
            await asyncio.gather(*(engine.stop() for engines in self._engines for engine in engines))
            acceptor.close()
            await self._pool.stop()
            await asyncio.to_thread(self._log.close)

    # --- loading

    async def _load_and_serve(self) -> int:
        stop = asyncio.create_task(self._stop.wait())
        if not await self._load_or_stop(stop):
            return 0
        engines_died = asyncio.create_task(self._watch_engines())
        pool_failed = self._pool.failed
        end_futures: set[asyncio.Future[Any]] = {stop, engines_died, pool_failed}
        await asyncio.wait(end_futures, return_when=asyncio.FIRST_COMPLETED)
        if pool_failed.done():
            print_line(f"meltcore serve: {pool_failed.result()}", sys.stderr)
        if not engines_died.done():
            await self._drain(engines_died)
        if engines_died.done():
            engines_died.result()
            await asyncio.sleep(DEAD_LINGER_S)
            return EXIT_FAILED
        engines_died.cancel()
        return EXIT_FAILED if pool_failed.done() else 0

    async def _load_or_stop(self, stop: asyncio.Task[bool]) -> bool:
        """Load and show the progress; False when a signal came meanwhile. Raises MeltcoreError."""
        progress, shown_progress = LoadingProgress(), ""
        loading = asyncio.create_task(self._load())
        while not loading.done() and not stop.done():
            progress.show(self._progress)
            if shown_progress != self._progress:
                shown_progress = self._progress
                self._set_status("loading", shown_progress)
            await asyncio.wait({loading, stop}, timeout=PROGRESS_S, return_when=asyncio.FIRST_COMPLETED)
        progress.clear()
        if not loading.done():
            self._set_status("draining", "the server is going down")
            loading.cancel()
            await asyncio.wait({loading}, timeout=CANCEL_LIMIT_S)
            return False
        try:
            engines = loading.result()
        except MeltcoreError:
            self._set_status("dead", "the model could not be loaded")
            raise
        self._set_status("ready", "ready")
        print_ready(self._config, engines, self._pool.synthetic_tokenizers, self._stats.api_servers)
        tune_gc()
        return True

    async def _load(self) -> list[ServedReady]:
        """Start API servers and engines; returns the limits of each model's engines. Raises MeltcoreError."""
        await self._pool.start([await asyncio.to_thread(find_task, model) for model in self._config.models])
        self._pool.broadcast(LoadText())
        starting = asyncio.gather(
            *(
                self._start(model, replica)
                for model, model_engines in enumerate(self._engines)
                for replica in range(len(model_engines))
            )
        )
        try:
            pending_futures: set[asyncio.Future[Any]] = {starting, self._pool.failed}
            await asyncio.wait(pending_futures, return_when=asyncio.FIRST_COMPLETED)
            if self._pool.failed.done():
                raise ConfigError(self._pool.failed.result())
            ready = iter(starting.result())
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)  # left unread, its error prints a traceback
            raise
        engines = [common_limits([next(ready) for _ in model_engines]) for model_engines in self._engines]
        await self._pool.open(Open(engines, int(time.time())))
        return engines

    async def _start(self, model: int, replica: int) -> ServedReady:
        try:
            return await self._engines[model][replica].start()
        except MeltcoreError as error:
            subject = self._describe(model, replica, "")
            if not subject:
                raise
            raise ConfigError(f"{subject}: {error}") from error

    # --- ending

    async def _drain(self, engines_died: asyncio.Task[None]) -> None:
        """Refuse new requests, let the open ones finish within the limit, then end them."""
        limit_s = self._config.drain_timeout_s
        self._set_status("draining", "the server is going down and takes no new requests")
        self._log.write("draining", open_requests=self._stats.open_requests(), limit_s=limit_s)
        deadline_s = time.monotonic() + limit_s
        while self._stats.open_requests() and time.monotonic() < deadline_s and not engines_died.done():
            await asyncio.wait({engines_died}, timeout=POLL_S)
        if not engines_died.done() and self._stats.open_requests():
            error = f"the server is going down, and {limit_s:g} s (--drain-timeout) were not enough for this answer"
            self._pool.broadcast(EndRequests(error, 503, "server_stopping"))
            while self._stats.open_requests() and time.monotonic() < deadline_s + DEAD_LINGER_S:
                await asyncio.wait({engines_died}, timeout=POLL_S)

    async def _watch_engines(self) -> None:
        """Wait until the last engine has died."""
        await asyncio.gather(
            *(
                self._watch(model, replica)
                for model, model_engines in enumerate(self._engines)
                for replica in range(len(model_engines))
            )
        )

    async def _watch(self, model: int, replica: int) -> None:
        """Wait for the death of a replica, and end its requests; the others continue."""
        engine, stats = self._engines[model][replica], self._stats.models[model]
        reason = await engine.wait()
        num_failed = round(stats.open_requests(replica))
        stats.mark_replica_dead(replica)
        self._pool.broadcast(ReplicaDied(model, replica, reason))
        engine.close_link()
        name = self._config.models[model].names[0]
        self._log.write("engine_died", model=name, replica=replica, why=reason, open_requests=num_failed)
        survivors_note = ""
        if stats.replicas > 1:
            survivors_note = f"; {len(stats.live_replicas())} of {stats.replicas} replicas go on without it"
        subject = self._describe(model, replica, "the engine")
        print_line(
            f"meltcore serve: {subject} has died: {reason}; {num_failed} open requests failed{survivors_note}",
            sys.stderr,
        )

    def _describe(self, model: int, replica: int, default: str) -> str:
        """Return the name of an engine in messages; `only`: the single engine of a server."""
        parts = [self._config.models[model].names[0]] if len(self._engines) > 1 else []
        parts += [f"replica {replica}"] if len(self._engines[model]) > 1 else []
        return " ".join(parts) or default

    # --- events

    def _set_status(self, status: ServerStatus, reason: str) -> None:
        self._pool.broadcast(StatusChanged(status, reason))

    def _on_engine_message(self, model: int, replica: int, message: FromEngine) -> None:
        if isinstance(
            message, StepOutputs | SynthesisOutputs | TranscriptionOutputs | TranslationOutputs
        ):  # also without outputs: a sign of life
            self._stats.models[model].record_step(shared_stats(message.stats), message.step_ended_s, replica)
        elif isinstance(message, Loading) and replica == 0:  # all load the same; shown together, they would alternate
            progress_note = f" ({message.fraction:.0%})" if message.fraction else ""  # unknown for many stages
            self._progress = f"loading: {message.stage}{progress_note}"

    def _on_unreadable(self, model: int, replica: int, reason: str) -> None:
        self._engines[model][replica].fail(reason)

    def _on_worker_lost(self, worker: int, exit_reason: str, open_requests: int) -> None:
        for engines, stats in zip(self._engines, self._stats.models, strict=True):
            for replica in stats.live_replicas():
                engines[replica].send(ForgetClient(worker))
        self._log.write("api_server_died", api_server=worker, how=exit_reason, open_requests=open_requests)
        death_message = f"API server process {worker} has died: {exit_reason}; {open_requests} open requests failed"
        print_line(f"meltcore serve: {death_message}", sys.stderr)

    def _on_exhausted(self, error: OSError) -> None:
        max_open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._log.write_rate_limited("accept_failed", error=error.strerror, file_limit=max_open_files)

    def _on_sighup(self) -> None:
        """Handle SIGHUP as a first SIGTERM: both the kernel and the shell send it, so it never forces the end."""
        if self._stopped_s is None:
            self._on_signal()

    def _on_signal(self) -> None:
        """Start to drain at the first signal; end everything now at a later second one."""
        now_s = asyncio.get_running_loop().time()
        if self._stopped_s is None:
            self._stopped_s = now_s
            self._stop.set()
        if now_s - self._stopped_s < SAME_SIGNAL_S:
            return
        for engines in self._engines:
            for engine in engines:
                engine.kill()
        self._pool.kill()
        self._folder.remove()
        os._exit(EXIT_FORCED)


def _check_names(config: ServerConfig) -> None:
    """Raise ConfigError when two models have the same name."""
    names = [name for model in config.models for name in set(model.names)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are served as {name}; give each a --served-model-name of its own")
