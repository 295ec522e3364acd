"""The API server processes of a server: started, given connections, watched, restarted.

The supervisor accepts and passes each connection to the worker with the fewest. Hashing connections over several
listening sockets (SO_REUSEPORT) leaves one worker with a fifth more than its share at 400 connections, and would let a
second server join a port in use.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from meltcore.api.stats import ServerStats
from meltcore.config import ServerConfig, Task
from meltcore.errors import ConfigError
from meltcore.fleet.channel import (
    Channel,
    EndRequests,
    Exit,
    FromAPIServer,
    LoadText,
    ModelsOpened,
    Open,
    ReplicaDied,
    Setup,
    Started,
    StatusChanged,
    WorkerFailed,
)
from meltcore.host_memory import ONE_ARENA_ENVIRONMENT
from meltcore.process import STDERR, describe_exit, start_async

_COMMAND = (sys.executable, "-m", "meltcore.fleet.api_server")
# Of several workers: Python's own allocator keeps a megabyte for one object that is left in it, 50 MB for good after
# 2,500 streams per process. The C library's returns all but the pages in use (see api/http_server.py), for a tenth more
# CPU per token, which a machine with cores for a single worker cannot spare.
_ALLOCATOR = {"PYTHONMALLOC": "malloc"}
_EXIT_LIMIT_S = 4.0  # from asking a worker to exit until it is killed; it closes its connections meanwhile
_RETRY_S = 0.05
CORES_PER_WORKER = 4
MAX_DEFAULT_WORKERS = 4
Broadcast = LoadText | Open | StatusChanged | EndRequests | ReplicaDied | Exit


def worker_count(config: ServerConfig) -> int:
    """Return the number of API server processes: as configured, else one per four cores, at most four.

    One moves about 40,000 tokens/s. While it is busy with one request, all its streams wait. Engines and clients need
    cores too.
    """
    cores = len(os.sched_getaffinity(0))
    return config.api_server_count or max(1, min(MAX_DEFAULT_WORKERS, cores // CORES_PER_WORKER))


class APIServerWorker:
    """One API server process, and the number of connections it was given."""

    def __init__(self, worker_id: int) -> None:
        self.worker_id = worker_id  # its row of the statistics and its sockets, from 1 on
        self.assigned = 0.0  # connections, those that a predecessor closed included
        self.process: asyncio.subprocess.Process | None = None
        self.channel: Channel[FromAPIServer] | None = None
        self.started = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether all models can be served."""
        return self.opened.done() and not self.opened.cancelled()

    def send(self, message: Broadcast) -> None:
        """Send a message. A worker that does not read its messages is killed."""
        running = self.process is not None and self.process.returncode is None
        if running and self.channel is not None and not self.channel.send(message):
            assert self.process is not None
            self.process.kill()


class WorkerPool:
    """All API server processes of a server."""

    def __init__(
        self,
        config: ServerConfig,
        stats: ServerStats,
        directory: Path,
        *,
        on_lost: Callable[[int, str, int], None],
        on_unreadable: Callable[[int, int, str], None],
    ) -> None:
        """Create the pool.

        `on_lost(worker_id, exit_reason, open_requests)`: called when a worker died. `on_unreadable(model, replica,
        reason)`: called when a worker could not decode a message of that engine.
        """
        self._config = config
        self._stats = stats
        self._directory = directory
        self._on_lost = on_lost
        self._on_unreadable = on_unreadable
        self._workers: list[APIServerWorker] = []
        self._watches: set[asyncio.Task[None]] = set()
        self._pending: deque[socket.socket] = deque()  # connections that no worker could take yet
        self._tasks: list[Task] = []
        self._state: dict[type[Broadcast], Broadcast] = {}  # what a restarted worker has to be sent
        self._all_opened = False  # once they are, one that is not gets no connections: it would refuse requests
        self._exiting = False
        self.synthetic_tokenizers: list[bool] = []
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self, tasks: Sequence[Task]) -> None:
        """Start every process. tasks: of the models."""
        self._tasks = list(tasks)
        for worker_id in range(1, self._stats.api_servers + 1):
            worker = APIServerWorker(worker_id)
            self._workers.append(worker)
            await self._start(worker)

    async def open(self, message: Open) -> None:
        """Let all workers accept requests, and wait until they can. Raises ConfigError when one cannot."""
        self.broadcast(message)
        all_open = asyncio.gather(*(worker.opened for worker in self._workers))
        pending_futures: set[asyncio.Future[Any]] = {self.failed, all_open}
        await asyncio.wait(pending_futures, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            all_open.cancel()
            await asyncio.gather(all_open, return_exceptions=True)  # left unread, its error prints a traceback
            raise ConfigError(self.failed.result())
        self._all_opened = True

    def assign(self, connection: socket.socket) -> None:
        """Pass `connection` to the worker with the fewest connections, or to the next one that starts."""
        self._pending.append(connection)
        if len(self._pending) == 1:
            self._assign_pending()

    def broadcast(self, message: Broadcast) -> None:
        """Send a message to every worker."""
        if isinstance(message, LoadText | Open | StatusChanged):
            self._state[type(message)] = message
        for worker in self._workers:
            if worker.started:
                worker.send(message)

    async def stop(self) -> None:
        """Let all workers close their connections and exit; kill those that exceed the limit."""
        self._exiting = True
        self.broadcast(Exit())
        self._kill(worker for worker in self._workers if not worker.started)
        if self._watches:
            await asyncio.wait(self._watches, timeout=_EXIT_LIMIT_S)
        self.kill()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for connection in self._pending:
            connection.close()

    def kill(self) -> None:
        """End all processes now."""
        self._exiting = True
        self._kill(self._workers)

    def _kill(self, workers: Iterable[APIServerWorker]) -> None:
        for worker in workers:
            if worker.process is not None and worker.process.returncode is None:
                worker.process.kill()

    def _assign_pending(self) -> None:
        closed_counts = self._stats.closed_connections()
        available_workers = [
            worker for worker in self._workers if (worker.is_open if self._all_opened else worker.started)
        ]
        while self._pending and available_workers:
            for worker in sorted(
                available_workers, key=lambda worker: worker.assigned - closed_counts[worker.worker_id]
            ):
                if worker.channel is not None and worker.channel.send_connection(self._pending[0]):
                    self._pending.popleft()
                    worker.assigned += 1
                    break
            else:  # all are busy, and their buffers full
                asyncio.get_running_loop().call_later(_RETRY_S, self._assign_pending)
                return

    async def _start(self, worker: APIServerWorker) -> None:
        allocator = _ALLOCATOR if self._stats.api_servers > 1 else {}
        parent_socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            worker.process = await start_async(
                _COMMAND,
                stdin=child_socket.fileno(),
                stdout=STDERR,
                environment=os.environ | ONE_ARENA_ENVIRONMENT | allocator,
            )
        finally:
            child_socket.close()
        worker.assigned = self._stats.closed_connections()[worker.worker_id]
        worker.channel = Channel(parent_socket, FromAPIServer)
        worker.channel.read(partial(self._on_message, worker), bool)  # its end is seen by `_watch`
        num_processes = self._stats.api_servers + 1
        setup = Setup(self._config, self._tasks, worker.worker_id, num_processes, str(self._directory))
        worker.channel.send(setup, self._stats.shared.fd)
        watch = asyncio.create_task(self._watch(worker))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)

    def _on_message(self, worker: APIServerWorker, message: FromAPIServer, _descriptors: list[int]) -> None:
        if isinstance(message, Started):
            worker.started = True
            for message_type in (LoadText, Open, StatusChanged):
                if message_type in self._state:
                    worker.send(self._state[message_type])
            self._assign_pending()
        elif isinstance(message, ModelsOpened):
            self.synthetic_tokenizers = message.synthetic_tokenizers
            worker.opened.set_result(None)
            self._assign_pending()
        elif isinstance(message, WorkerFailed) and message.cause == "engine":
            self._on_unreadable(message.model, message.replica, message.message)
        else:
            self._fail(message.message)

    async def _watch(self, worker: APIServerWorker) -> None:
        """Wait for the end of a worker. It is restarted, unless it ended before it could serve."""
        assert worker.process is not None
        exit_text = describe_exit(await worker.process.wait())
        assert worker.channel is not None
        worker.channel.close()
        if self._exiting:
            return
        was_open = worker.is_open
        worker.started, worker.opened = False, asyncio.get_running_loop().create_future()
        if not was_open:
            self._fail(f"API server process {worker.worker_id} ended while starting ({exit_text})")
            return
        self._on_lost(
            worker.worker_id,
            exit_text,
            sum(model.fail_process_requests(worker.worker_id) for model in self._stats.models),
        )
        status = self._state.get(StatusChanged)
        is_ready = isinstance(status, StatusChanged) and status.status == "ready"
        if is_ready and any(model.live_replicas() for model in self._stats.models):
            await self._start(worker)

    def _fail(self, reason: str) -> None:
        if not self.failed.done():
            self.failed.set_result(reason)
