"""The base class of the backends of transcription and synthesis. It has worker processes for audio."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from meltcore.audio.pool import AudioWorkers
from meltcore.common.errors import ConfigError, RequestError
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.open_tickets import OpenTickets
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.settings.fleet_spec import ModelSection

# Uploads of open requests in this process. Beyond it requests are refused: memory stays bounded.
_MAX_UPLOADS_BYTES = 2**30
# Requests that the admission counts as running; more are in the queue.
_RUNNING_REQUESTS = 64


_Work = TypeVar("_Work", bound=Child)


class AudioBackend(EngineBackend, Generic[_Work]):
    """Connects one API server process to the engines of a model that transcribes or speaks.

    A ticket has one child, all of whose messages go to one replica. The child's cost there is the number of bytes of
    its upload.
    """

    child_type: type[_Work]

    def __init__(
        self, name: str, config: ModelSection, server: ServerStats, stats: ModelStats, **settings: Any
    ) -> None:
        super().__init__(name, config, server, stats, **settings)
        self.workers = AudioWorkers()
        self.tickets: OpenTickets[_Work] = OpenTickets(
            stats,
            lambda message, replica: self._send(message, replica),
            self._new_queue(_RUNNING_REQUESTS),
            self._limit_s,
        )

    def load(self) -> None:
        """Load nothing. Raises ConfigError if a package that reads uploads is missing."""
        check_audio_packages()

    async def close_workers(self) -> None:
        """End the worker processes of this backend."""
        await self.workers.close()

    @asynccontextmanager
    async def admitted(self, upload_bytes: int, units: float) -> AsyncIterator[_Work]:
        """Wait for a request's turn, and yield the child that a replica serves. End the request after the block.

        `units` are those by which the queue is bounded beside the number of requests. Raises RequestError: 429 if the
        queue is full, 503 while the model cannot serve, and 504 after the time limit.
        """
        self._live_replicas()
        open_bytes = sum(child.cost for child in self.tickets)
        if open_bytes and open_bytes + upload_bytes > _MAX_UPLOADS_BYTES:
            self.stats.add("rejected_queue_full")
            raise RequestError(
                f"the queue is full: uploads of {open_bytes + upload_bytes} bytes would wait, "
                f"the limit is {_MAX_UPLOADS_BYTES}",
                status=429,
                code="queue_full",
            )
        ticket: Ticket[_Work] = Ticket(time.monotonic())
        child = self.child_type(ticket, upload_bytes)
        async with self.tickets.admitted(ticket, self.config.priority, units=units, cost=max(1.0, units)):
            yield child
        self.stats.finish(
            "stop", prompt_tokens=0, arrived_s=ticket.arrived_s, first_token_s=None, now_s=time.monotonic(), times=None
        )


def check_audio_packages() -> None:
    """Raise ConfigError if a package that reads uploads is missing."""
    packages = ("python_multipart", "regex", "sacremoses", "sentencepiece", "soundfile", "soxr", "yaml")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"speech models need {', '.join(missing)}: pip install 'meltcore[audio,engine]'")
