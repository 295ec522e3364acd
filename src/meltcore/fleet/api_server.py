"""An API server process: `python -m meltcore.fleet.api_server`, with its channel as standard input.

It serves the connections that the supervisor passes to it, with its own sockets to the engines and its own row of the
shared statistics. The end of the channel means that the supervisor is gone, and ends this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import uvloop

from meltcore.api.backend import ModelTable
from meltcore.api.http_server import HttpServer, tune_gc
from meltcore.api.log import Log
from meltcore.api.metrics import Metrics
from meltcore.api.routes import build_app
from meltcore.api.stats import ServerStats
from meltcore.backends.audio_backend import AudioBackend, check_audio_packages
from meltcore.backends.local_engine import LocalEngine
from meltcore.backends.synthesis_engine import SynthesisEngine
from meltcore.backends.text_model import TextModel, load_text
from meltcore.backends.transcription_engine import TranscriptionEngine
from meltcore.config import Task
from meltcore.errors import MeltcoreError, RequestError
from meltcore.fleet.channel import (
    MESSAGE_BYTES,
    AddConnection,
    Channel,
    EndRequests,
    Exit,
    LoadText,
    ModelsOpened,
    Open,
    ReplicaDied,
    Setup,
    Started,
    StatusChanged,
    ToAPIServer,
    WorkerFailed,
)
from meltcore.fleet.listener import raise_file_limit
from meltcore.protocol.synthesis import SynthesisReady
from meltcore.protocol.transcription import TranscriptionReady

if TYPE_CHECKING:
    from meltcore.backends.translations import TranslationText


_BACKENDS: dict[Task, type[LocalEngine | SynthesisEngine | TranscriptionEngine]] = {
    "text": LocalEngine,
    "recognition": TranscriptionEngine,
    "synthesis": SynthesisEngine,
}


class APIServer:
    """One API server process, from its setup to its end."""

    def __init__(self, channel_socket: socket.socket, setup: Setup, stats_fd: int) -> None:
        config = self._config = setup.config
        replicas = [model.data_parallel_size for model in config.models]
        stats = ServerStats(replicas, num_processes=setup.num_processes, process_index=setup.api_server, fd=stats_fd)
        self._stats = stats
        self._channel: Channel[ToAPIServer] = Channel(channel_socket, ToAPIServer)
        self._log = Log(config.log_format, stats)
        self._backends = [
            _BACKENDS[setup.tasks[index]](model, stats, stats.models[index], request_timeout_s=config.request_timeout_s)
            for index, model in enumerate(config.models)
        ]
        engines = iter(range(sum(replicas)))
        for index, backend in enumerate(self._backends):
            engine_ids = [next(engines) for _ in range(replicas[index])]
            on_unreadable = partial(self._report_unreadable, index)
            backend.connect(Path(setup.directory), engine_ids, setup.api_server, on_unreadable)
        metrics = Metrics([backend.names[0] for backend in self._backends], stats)
        self._http = HttpServer(build_app(ModelTable(self._backends), config, metrics, self._log), stats)
        self._texts: asyncio.Task[list[TextModel | TranslationText | None] | None] | None = None
        self._opening: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Serve until the supervisor sends `Exit`."""
        self._channel.read(self._on_message, partial(os._exit, 0))
        self._channel.send(Started())
        await self._http.serve()
        for backend in self._backends:
            backend.close()
            if isinstance(backend, AudioBackend):
                await backend.close_workers()
        await asyncio.to_thread(self._log.close)

    def _on_message(self, message: ToAPIServer, descriptors: list[int]) -> None:
        if isinstance(message, AddConnection):
            self._add_connection(descriptors)
        elif isinstance(message, StatusChanged):
            for backend in self._backends:
                backend.health.set(message.status, message.reason)
        elif isinstance(message, LoadText):
            self._texts = asyncio.create_task(self._load_texts())
        elif isinstance(message, Open):
            self._opening = asyncio.create_task(self._open(message))
        elif isinstance(message, EndRequests):
            error = RequestError(message.message, status=message.status, code=message.code)
            for backend in self._backends:
                backend.end_all(error, "aborted")
        elif isinstance(message, ReplicaDied):
            self._backends[message.model].replica_died(message.replica, message.reason)
        elif isinstance(message, Exit):
            self._http.stop()

    def _add_connection(self, descriptors: list[int]) -> None:
        """Serve a connection. When this process is out of descriptors, the kernel has closed it already."""
        if descriptors:
            self._http.add_connection(socket.socket(fileno=descriptors[0]))
        else:
            self._stats.add("connections_closed")
            self._log.write_rate_limited("connection_lost", error="no file descriptor is left")

    async def _load_texts(self) -> list[TextModel | TranslationText | None] | None:
        try:
            if any(isinstance(backend, AudioBackend) for backend in self._backends):
                check_audio_packages()
            return [
                await asyncio.to_thread(load_text, backend.config) if isinstance(backend, LocalEngine) else None
                for backend in self._backends
            ]
        except MeltcoreError as error:
            self._channel.send(WorkerFailed("start", str(error)))
            return None

    async def _open(self, message: Open) -> None:
        assert self._texts is not None
        texts = await self._texts
        if texts is None:
            return  # reported already
        for backend, text, engine in zip(self._backends, texts, message.engines, strict=True):
            if isinstance(backend, TranscriptionEngine):
                assert isinstance(engine, TranscriptionReady)
                backend.open(engine, message.created)
            elif isinstance(backend, SynthesisEngine):
                assert isinstance(engine, SynthesisReady)
                backend.open(engine, message.created)
            else:
                assert text is not None
                assert not isinstance(engine, TranscriptionReady | SynthesisReady)
                backend.open(text, engine, message.created)
        tune_gc()
        synthetic = [
            text.is_synthetic if text is not None else getattr(engine, "tokens", "real") == "synthetic"
            for text, engine in zip(texts, message.engines, strict=True)
        ]
        self._channel.send(ModelsOpened(synthetic))

    def _report_unreadable(self, model: int, replica: int, reason: str) -> None:
        self._channel.send(WorkerFailed("engine", reason, model, replica))


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
        runner.run(_serve(channel_socket, setup, descriptors[0]))
    return 0


async def _serve(channel_socket: socket.socket, setup: Setup, stats_fd: int) -> None:
    await APIServer(channel_socket, setup, stats_fd).run()


if __name__ == "__main__":
    sys.exit(main())
