"""Runs an API server process. The supervisor starts it, with the channel to the supervisor as standard input.

The process serves the connections that the supervisor passes to it. It has its own sockets to the engines and its own
row of the shared statistics. The process ends when the channel ends, because then the supervisor has ended too.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import uvloop
import zmq

from meltcore.common.errors import ConfigError, MeltcoreError, RequestError
from meltcore.common.tasks import DEFAULT, load, tasks
from meltcore.protocol.channel import (
    MESSAGE_BYTES,
    AddConnection,
    AddModel,
    Channel,
    EndRequests,
    EngineUnreadable,
    Exit,
    ModelFailed,
    ModelOpened,
    OpenModel,
    RemoveModel,
    ReplicaEnded,
    ReplicaStarted,
    RoutesChanged,
    Setup,
    Started,
    StatusChanged,
    ToAPIServer,
)
from meltcore.protocol.engines import from_engine
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.engines.engine_link import socket_folder
from meltcore.serve.http.hops import set_own_name
from meltcore.serve.http.http_server import HttpServer, tune_gc
from meltcore.serve.http.listener import raise_file_limit
from meltcore.serve.http.tls import TlsCertificate
from meltcore.serve.requests.admission import MODEL_ASLEEP, asleep_error
from meltcore.serve.requests.backend import ModelTable
from meltcore.serve.requests.keys import ApiKeys
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.metrics import Metrics
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.requests.tracing import Tracing
from meltcore.serve.routes import build_app
from meltcore.serve.upstream.http_backend import HttpBackend


class APIServer:
    """Runs one API server process, from setup to exit."""

    def __init__(self, channel_socket: socket.socket, setup: Setup, stats_fd: int) -> None:
        config = self._config = setup.config
        self._setup = setup
        set_own_name(setup.name)
        stats = ServerStats(
            (),
            keys=len(config.keys),
            num_processes=setup.num_processes,
            process_index=setup.api_server,
            fds=[stats_fd],
        )
        os.close(stats_fd)
        self._stats = stats
        self._channel: Channel[ToAPIServer] = Channel(channel_socket, ToAPIServer)
        self._log = Log(config.server.log_format, stats)
        self._models: dict[int, EngineBackend | HttpBackend] = {}
        self._model_table = ModelTable()
        self._closing: set[asyncio.Task[None]] = set()
        metrics = Metrics(stats, lambda: {backend.names[0]: backend.stats for backend in self._model_table.backends})
        keys = ApiKeys(config.keys, stats)
        endpoint = config.server.otlp_endpoint
        self._tracing = None if endpoint is None else Tracing(endpoint, stats, self._log)
        app = build_app(self._model_table, config, metrics, self._log, keys, self._tracing)
        self._http = HttpServer(app, stats, self._certificate())

    def _certificate(self) -> TlsCertificate | None:
        server = self._config.server
        if server.ssl_certfile is None:
            return None

        def report(reason: str) -> None:
            self._log.write("certificate_unusable", error=reason)

        return TlsCertificate(server.ssl_certfile, server.ssl_keyfile, report)

    async def run(self) -> None:
        """Serve requests until the supervisor sends `Exit`."""
        self._channel.read(self._on_message, partial(os._exit, 0))
        self._channel.send(Started())
        await self._http.serve()
        for model in list(self._models):
            self._remove_model(model)
        await asyncio.gather(*self._closing)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        await asyncio.to_thread(self._log.close)

    def _on_message(self, message: ToAPIServer, descriptors: list[int]) -> None:
        if isinstance(message, AddConnection):
            self._add_connection(descriptors)
        elif isinstance(message, AddModel):
            if message.model in self._models:  # its task was unknown
                self._remove_model(message.model)
            self._add(message, descriptors)
            for missed_message in (message.open, message.status):
                if missed_message is not None and message.model in self._models:
                    self._on_model_message(missed_message)
        elif isinstance(message, RoutesChanged):
            self._model_table.change_routes(message.order, message.languages, message.routes)
        elif isinstance(message, Exit):
            self._http.stop()
        elif not isinstance(message, Setup) and message.model in self._models:
            self._on_model_message(message)

    def _on_model_message(
        self, message: OpenModel | StatusChanged | EndRequests | ReplicaStarted | ReplicaEnded | RemoveModel
    ) -> None:
        backend = self._models[message.model]
        if isinstance(message, StatusChanged):
            backend.health.set(message.status, message.reason)
            if isinstance(backend, HttpBackend):
                backend.check_health()
        elif isinstance(message, EndRequests):
            error = RequestError(message.message, status=message.status, code=message.code)
            if message.code == MODEL_ASLEEP:
                error = asleep_error(backend.stats, message.message)
            backend.end_all(error, "aborted", message.replica)
        elif isinstance(message, RemoveModel):
            self._remove_model(message.model)
        elif isinstance(backend, HttpBackend):
            return  # it has no engines
        elif isinstance(message, OpenModel):
            backend.opening = asyncio.create_task(self._open(backend, message))
        elif isinstance(message, ReplicaStarted):
            self._connect(message.model, message.replica, message.engine)
        else:
            backend.replica_ended(message.replica, message.message)

    def _add_connection(self, descriptors: list[int]) -> None:
        """Serve the accepted connection that `descriptors` has.

        The list is empty if this process has no free descriptors. The kernel has then already closed the connection.
        """
        if descriptors:
            self._http.add_connection(socket.socket(fileno=descriptors[0]))
        else:
            self._stats.add("connections_closed")
            self._log.write_rate_limited("connection_lost", error="no file descriptor is left")

    def _add(self, message: AddModel, descriptors: list[int]) -> None:
        if not descriptors:
            self._channel.send(ModelFailed(message.model, "no file descriptor is left for its statistics"))
            return
        stats = self._stats.add_model(message.model, message.config.replicas, descriptors[0])
        os.close(descriptors[0])
        if message.config.kind == "engine":
            self._add_model(message, stats)
        else:
            self._add_upstream(message, stats)

    def _add_upstream(self, message: AddModel, stats: ModelStats) -> None:
        try:
            backend = HttpBackend(
                message.name,
                message.config,
                message.urls,
                stats,
                limits=self._config.limits,
                timeouts=self._config.timeouts,
            )
        except MeltcoreError as error:  # the environment lacks a key, as the supervisor has found before
            self._channel.send(ModelFailed(message.model, str(error)))
            return
        backend.start()
        self._models[message.model] = backend
        self._model_table.add(backend)
        self._channel.send(ModelOpened(message.model, False))

    def _add_model(self, message: AddModel, stats: ModelStats) -> None:
        stats.task = message.task or DEFAULT.name
        backend: EngineBackend = load(tasks()[stats.task].backend)(
            message.name,
            message.config,
            self._stats,
            stats,
            limits=self._config.limits,
            request_timeout_s=self._config.timeouts.request_s,
        )
        self._models[message.model] = backend
        for replica, engine in enumerate(message.engines):
            if engine is None:
                stats.set_connected(replica, False)
            else:
                self._connect(message.model, replica, engine)
        if message.task is not None:
            backend.loading = asyncio.create_task(self._load_text(message.model, backend))
        self._model_table.add(backend)

    def _remove_model(self, model: int) -> None:
        removed = self._models.pop(model)
        self._model_table.remove(removed)
        error = RequestError(f"{removed.names[0]} was removed from the fleet", status=503, code="model_stopping")
        removed.end_all(error, "aborted")  # what was accepted before this process knew that the model drains
        self._stats.remove_model(model)
        removed.close()
        if isinstance(removed, EngineBackend):
            for work in (removed.loading, removed.opening):
                if work is not None:
                    work.cancel()
            task = asyncio.create_task(removed.close_workers())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _connect(self, model: int, replica: int, engine: int) -> None:
        folder = socket_folder(Path(self._setup.directory), engine)
        on_unreadable = partial(self._report_unreadable, model)
        backend = self._models[model]
        assert not isinstance(backend, HttpBackend)
        try:
            backend.connect(replica, folder, self._setup.api_server, on_unreadable)
        except zmq.ZMQError as error:  # as where no file descriptor is left
            self._report_failure(model, backend, error)

    async def _load_text(self, number: int, backend: EngineBackend) -> Any:
        """Return the result of the backend's `load`, such as a tokenizer.

        Returns None if the backend loads nothing. Returns None also if loading fails, which is reported to the
        supervisor.
        """
        try:
            return await asyncio.to_thread(backend.load)
        except MeltcoreError as error:
            self._report_failure(number, backend, error)
        return None

    def _report_failure(self, number: int, backend: EngineBackend, error: Exception) -> None:
        backend.health.fail(f"{backend.names[0]} could not be loaded by this API server process: {error}")
        self._channel.send(ModelFailed(number, str(error)))

    async def _open(self, backend: EngineBackend, message: OpenModel) -> None:
        assert backend.loading is not None
        text, engine = await backend.loading, msgspec.msgpack.decode(message.engine, type=from_engine())
        if backend.health.has_failed:
            return  # reported already
        backend.open(text, engine, message.created)
        tune_gc()
        is_synthetic = text.is_synthetic if text is not None else getattr(engine, "tokens", "real") == "synthetic"
        self._channel.send(ModelOpened(message.model, is_synthetic))

    def _report_unreadable(self, model: int, replica: int, reason: str) -> None:
        self._channel.send(EngineUnreadable(model, replica, reason))


def main() -> int:
    """Run the API server process that the supervisor describes on the channel."""
    # The supervisor decides when to exit; a signal to the whole process group is for it.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    raise_file_limit()
    channel_socket = socket.socket(fileno=sys.stdin.fileno())
    data, descriptors, _, _ = socket.recv_fds(channel_socket, MESSAGE_BYTES, 1)
    if not data:
        return 0  # the supervisor is gone
    setup = msgspec.msgpack.decode(data, type=Setup)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(channel_socket, setup, descriptors[0]))
        except ConfigError as error:  # files of the certificate that became unusable since the server has started
            print(f"meltcore: API server process {setup.api_server}: {error}", file=sys.stderr)
            return 2
    return 0


async def _serve(channel_socket: socket.socket, setup: Setup, stats_fd: int) -> None:
    await APIServer(channel_socket, setup, stats_fd).run()
