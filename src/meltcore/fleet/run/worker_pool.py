"""Starts, watches and restarts the API server processes of a server, and gives them connections.

The supervisor accepts each connection and passes it to the worker with the fewest connections. The alternative is to
hash connections over several listening sockets (SO_REUSEPORT). With 400 connections this gives one worker a fifth more
than its share. It would also let a second server use a port that is in use.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.host_memory import ONE_ARENA_ENVIRONMENT
from meltcore.common.process import STDERR, describe_exit, is_stopped, start_async
from meltcore.fleet.processes.stuck_watch import STOPPED, StuckWatch
from meltcore.fleet.run.restart_policy import RestartPolicy
from meltcore.protocol.channel import (
    AddModel,
    Channel,
    EndRequests,
    EngineUnreadable,
    Exit,
    FromAPIServer,
    ModelFailed,
    OpenModel,
    RemoveModel,
    ReplicaEnded,
    ReplicaStarted,
    RoutesChanged,
    Setup,
    Started,
    StatusChanged,
    ToAPIServer,
    take_unread_connections,
)
from meltcore.serve.http.hops import own_name
from meltcore.serve.requests.stats import ServerStats
from meltcore.settings.fleet_spec import FleetSpec
from meltcore.settings.routes_section import LanguagesSection, RoutesSection

_COMMAND = (sys.executable, "-m", "meltcore.serve.api_server_main")
# Of several workers: Python's own allocator keeps a megabyte for one object that is left in it, 50 MB for good after
# 2,500 streams per process. The C library's returns all but the pages in use (see http_server.py), for a tenth more
# CPU per token, which a machine with cores for a single worker cannot spare.
_ALLOCATOR = {"PYTHONMALLOC": "malloc"}
_EXIT_LIMIT_S = 4.0  # from asking a worker to exit until it is killed; it closes its connections meanwhile
_RETRY_S = 0.05
ASSIGN_LIMIT_S = 60.0  # for a worker that serves all open models to take a connection
CORES_PER_WORKER = 4
MAX_DEFAULT_WORKERS = 4
ModelMessage = OpenModel | StatusChanged | EndRequests | ReplicaStarted | ReplicaEnded


def worker_count(config: FleetSpec) -> int:
    """Return the configured number of API server processes, by default one per four cores and at most four.

    One process passes on about 40,000 tokens/s. All its streams wait while it is busy with one request. Engines and
    clients need cores too.
    """
    cores = len(os.sched_getaffinity(0))
    return config.server.api_server_count or max(1, min(MAX_DEFAULT_WORKERS, cores // CORES_PER_WORKER))


class APIServerWorker:
    """One API server process, and the number of its connections."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id  # its row of the statistics and its sockets, from 1 on
        self.assigned = 0.0  # connections, those that a predecessor closed included
        self.process: asyncio.subprocess.Process | None = None
        self.channel: Channel[FromAPIServer] | None = None
        # Its end of the channel. Held here too, it outlives the process, with the connections that it left unread.
        self.worker_socket: socket.socket | None = None
        self.started = False
        self.opened: set[int] = set()  # models that it can serve
        self.has_served = False  # it or a predecessor
        self.early_deaths = 0  # predecessors in a row that ended before they could serve
        self.problem = ""  # why it was killed

    def send(self, message: ToAPIServer, descriptor: int | None = None) -> None:
        """Send a message. If the worker does not read its messages, kill it."""
        running = self.process is not None and self.process.returncode is None
        if running and self.channel is not None and not self.channel.send(message, descriptor):
            self.fail("it does not read the supervisor's messages")

    def fail(self, reason: str) -> None:
        """Kill the process. `reason` is the reason of its end in messages."""
        if self.process is not None and self.process.returncode is None:
            self.problem = reason
            self.process.kill()


class WorkerPool:
    """Runs all API server processes of a server."""

    def __init__(
        self,
        config: FleetSpec,
        stats: ServerStats,
        directory: Path,
        *,
        policy: RestartPolicy,
        report: Callable[[str], None],
        on_lost: Callable[[int, str, int], None],
        on_unreadable: Callable[[int, int, str], None],
    ) -> None:
        """Create the pool.

        Args:
            config: settings of the server.
            stats: statistics of the server.
            directory: folder of the engines' sockets.
            policy: decides when a worker is restarted, and when the server ends.
            report: prints a line.
            on_lost: is called with (worker id, exit reason, open requests) when a worker has died.
            on_unreadable: is called with (model, replica, reason) when a worker could not decode a message of that
                engine.
        """
        self._config = config
        self._stats = stats
        self._directory = directory
        self._on_lost = on_lost
        self._on_unreadable = on_unreadable
        self._workers: list[APIServerWorker] = []
        self._watches: set[asyncio.Task[None]] = set()
        # Connections that no worker could take yet, with the times at which they are closed.
        self._pending: deque[tuple[float, socket.socket]] = deque()
        self._retry: asyncio.TimerHandle | None = None
        self._models: dict[int, AddModel] = {}  # as a worker that starts later is sent them
        # Done once all workers can serve a model, with whether its tokenizer is a substitute.
        self._opened: dict[int, asyncio.Future[bool]] = {}
        self._policy, self._report = policy, report
        self._exiting = False
        self._stuck_watch = StuckWatch(lambda: self._workers, self._problem)
        self._watching: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """Start every process."""
        for worker_id in range(1, self._stats.api_servers + 1):
            worker = APIServerWorker(worker_id)
            self._workers.append(worker)
            await self._start(worker)
        self._watching = asyncio.create_task(self._stuck_watch.run())

    # --- models

    def add_model(self, message: AddModel) -> None:
        """Tell all workers to load the tokenizer of a model, or to watch the servers of an upstream model."""
        self._models[message.model] = message
        opened = self._opened[message.model] = asyncio.get_running_loop().create_future()
        opened.add_done_callback(lambda opened: opened.cancelled() or opened.exception())  # may be read by no one
        self._send(message, self._stats.model(message.model).shared.fd)

    def remove_model(self, model: int) -> None:
        """Tell all workers to remove a model."""
        del self._models[model], self._opened[model]
        for worker in self._workers:
            worker.opened.discard(model)
        self._send(RemoveModel(model))

    def _send(self, message: ToAPIServer, descriptor: int | None = None) -> None:
        for worker in self._workers:
            if worker.started:
                worker.send(message, descriptor)

    async def open_model(self, message: OpenModel) -> bool:
        """Tell all workers to accept requests for a model, and wait until they can.

        Return whether the model's tokenizer is a substitute. Raises ConfigError if a worker cannot load the files it
        needs.
        """
        opened = self._opened[message.model]
        self.broadcast(message)
        waited: set[asyncio.Future[Any]] = {opened, self.failed}
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if not opened.done():
            raise ConfigError(self.failed.result())
        return opened.result()

    def change_routes(self, config: FleetSpec) -> None:
        """Send the routes of `config` to all workers, also to those that start later."""
        self._config = config
        self._send(self._routes())

    def _routes(self) -> RoutesChanged:
        return RoutesChanged(tuple(self._config.models), self._config.languages, self._config.routes)

    @property
    def num_models(self) -> int:
        """The number of models of the server."""
        return len(self._models)

    def model_failed(self, model: int) -> asyncio.Future[bool]:
        """Return a future that raises a worker's error if the worker cannot serve a model.

        The future is done without an error when all workers can serve the model.
        """
        return self._opened[model]

    def broadcast(self, message: ModelMessage) -> None:
        """Send a message about a model to every worker."""
        self._models[message.model] = _after(self._models[message.model], message)
        self._send(message)

    # --- connections

    def assign(self, connection: socket.socket) -> None:
        """Pass `connection` to the worker with the fewest connections.

        If there is no worker, the next one to start gets it, or it is closed after ASSIGN_LIMIT_S.
        """
        self._pending.append((time.monotonic() + ASSIGN_LIMIT_S, connection))
        if len(self._pending) == 1:
            self._assign_pending()

    async def stop(self) -> None:
        """Tell all workers to close their connections and to exit. Workers that exceed the time limit are killed."""
        self._exiting = True
        if self._watching is not None:
            self._watching.cancel()
        for worker in self._workers:
            if worker.started:
                worker.send(Exit())
        self._kill(worker for worker in self._workers if not worker.started)
        if self._watches:
            await asyncio.wait(self._watches, timeout=_EXIT_LIMIT_S)
        self.kill()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for _, connection in self._pending:
            connection.close()
        self._pending.clear()

    def kill(self) -> None:
        """Kill all processes immediately."""
        self._exiting = True
        self._kill(self._workers)

    def _kill(self, workers: Iterable[APIServerWorker]) -> None:
        for worker in workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.kill()

    def _assign_pending(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        closed_counts = self._stats.closed_connections()
        available_workers = [worker for worker in self._workers if self._is_available(worker)]
        while self._pending and available_workers:
            for worker in sorted(
                available_workers, key=lambda worker: worker.assigned - closed_counts[worker.worker_id]
            ):
                if worker.channel is not None and worker.channel.send_connection(self._pending[0][1]):
                    self._pending.popleft()
                    worker.assigned += 1
                    break
            else:  # all are busy, and their buffers full
                break
        while self._pending and self._pending[0][0] < time.monotonic():
            self._pending.popleft()[1].close()
        if self._pending:
            self._retry = asyncio.get_running_loop().call_later(_RETRY_S, self._assign_pending)

    def _is_available(self, worker: APIServerWorker) -> bool:
        """Return whether a worker serves all models that other workers serve.

        Otherwise it would refuse some requests.
        """
        return worker.started and all(
            number in worker.opened for number, opened in self._opened.items() if _is_open(opened)
        )

    # --- processes

    async def _start(self, worker: APIServerWorker) -> None:
        allocator = _ALLOCATOR if self._stats.api_servers > 1 else {}
        parent_socket, worker_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            worker.process = await start_async(
                _COMMAND,
                stdin=worker_socket.fileno(),
                stdout=STDERR,
                environment=os.environ | ONE_ARENA_ENVIRONMENT | allocator,
            )
        except BaseException:
            parent_socket.close()
            worker_socket.close()
            raise
        worker.worker_socket = worker_socket
        worker.assigned = self._stats.closed_connections()[worker.worker_id]
        worker.channel = Channel(parent_socket, FromAPIServer)
        worker.channel.read(partial(self._on_message, worker), bool)  # its end is seen by `_watch`
        num_processes = self._stats.api_servers + 1
        config = msgspec.structs.replace(self._config, models={}, languages=LanguagesSection(), routes=RoutesSection())
        setup = Setup(config, worker.worker_id, num_processes, str(self._directory), own_name())
        worker.channel.send(setup, self._stats.shared.fd)
        watch = asyncio.create_task(self._watch(worker))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _on_message(self, worker: APIServerWorker, message: FromAPIServer, _descriptors: list[int]) -> None:
        if isinstance(message, Started):
            worker.started = True
            worker.send(self._routes())  # not in its setup: they name models
            for number, model in self._models.items():
                worker.send(model, self._stats.model(number).shared.fd)
            self._assign_pending()
        elif isinstance(message, EngineUnreadable):
            if message.model in self._models:
                self._on_unreadable(message.model, message.replica, message.message)
        elif (opened := self._opened.get(message.model)) is not None:  # else it has been removed meanwhile
            if isinstance(message, ModelFailed):
                self._on_model_failed(worker, message)
                return
            worker.opened.add(message.model)
            if all(message.model in each.opened for each in self._workers) and not opened.done():
                opened.set_result(message.synthetic)
            self._assign_pending()

    def _on_model_failed(self, worker: APIServerWorker, message: ModelFailed) -> None:
        opened, name = self._opened[message.model], self._models[message.model].name
        reason = self._policy.error_text(name, ConfigError(message.message))
        if not opened.done():
            opened.set_exception(ConfigError(reason))
        elif _is_open(opened):  # the others have loaded it
            text = f"API server process {worker.worker_id} cannot serve {name}: {reason}"
            if not self._policy.continues_without_api_server(is_serving=False):
                self._fail(text)
                return
            self._report(f"{text}; it serves the other models")
            worker.opened.add(message.model)  # it refuses requests for this one
            self._assign_pending()

    def _problem(self, worker: APIServerWorker, _index: int, _now_s: float) -> str | None:
        """Return why a worker looks stuck, or None if it is idle: if it has started and has no connections."""
        if worker.started and worker.assigned <= self._stats.closed_connections()[worker.worker_id]:
            return None
        process = worker.process
        return STOPPED if process is not None and process.returncode is None and is_stopped(process.pid) else None

    async def _watch(self, worker: APIServerWorker) -> None:
        """Wait for the end of a worker. Start it again if it could serve before it ended.

        In a fleet a restarted worker may end early a few times, because one fault must not end all models.
        """
        assert worker.process is not None
        exit_text = describe_exit(await worker.process.wait())
        exit_text = f"{worker.problem} ({exit_text})" if worker.problem else exit_text
        worker.problem = ""
        assert worker.channel is not None
        assert worker.worker_socket is not None
        connections = take_unread_connections(worker.worker_socket)
        worker.channel.close()
        if self._exiting:
            for connection in connections:
                connection.close()
            return
        any_open = any(map(_is_open, self._opened.values()))
        has_served = self._is_available(worker) and self._policy.continues_without_api_server(is_serving=any_open)
        worker.started, worker.opened = False, set()
        for connection in connections:
            self.assign(connection)
        if has_served:
            worker.has_served, worker.early_deaths = True, 0
        elif worker.has_served and worker.early_deaths < self._policy.max_early_deaths:
            worker.early_deaths += 1
        else:
            self._fail(f"API server process {worker.worker_id} ended while starting ({exit_text})")
            return
        self._on_lost(
            worker.worker_id,
            exit_text,
            sum(model.fail_process_requests(worker.worker_id) for model in self._stats.models),
        )
        is_serving = any(
            model.status is not None and model.status.status == "ready" and self._stats.model(number).live_replicas()
            for number, model in self._models.items()
        )
        if self._policy.continues_without_api_server(is_serving=is_serving):
            await self._start(worker)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)


def _after(model: AddModel, message: ModelMessage) -> AddModel:
    """Return `model`, the message that adds a model to a worker, changed for workers that start after `message`."""
    if isinstance(message, StatusChanged):
        return msgspec.structs.replace(model, status=message)
    if isinstance(message, EndRequests):
        return model
    if isinstance(message, OpenModel):
        return msgspec.structs.replace(model, open=message)
    engines = list(model.engines)
    engines[message.replica] = message.engine if isinstance(message, ReplicaStarted) else None
    return msgspec.structs.replace(model, engines=engines)


def _is_open(opened: asyncio.Future[bool]) -> bool:
    return opened.done() and not opened.cancelled() and opened.exception() is None
