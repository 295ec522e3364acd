"""What the backends of transcription and synthesis share: admission, the time limit, and refused routes."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

from meltcore.audio.pool import AudioWorkers
from meltcore.common.errors import ConfigError, RequestError
from meltcore.protocol.engines import FromEngine, shared_stats
from meltcore.protocol.shell import ProfileDone
from meltcore.protocol.synthesis import SynthesisOutputs, SynthesisReady
from meltcore.protocol.transcription import TranscriptionOutputs, TranscriptionReady
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.admission import AUDIO_S, Admission, Unit
from meltcore.serve.requests.request_queue import EQUAL_SHARES, RequestQueue
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.requests.ticket import Child, OpenTickets, Ticket
from meltcore.settings.config import ModelConfig

# Uploads of open requests in this process. Beyond it requests are refused: memory stays bounded.
_MAX_UPLOADS_BYTES = 2**30
# Requests that the admission counts as running; more are in the queue.
_RUNNING_REQUESTS = 64


_Ready = TypeVar("_Ready", bound=SynthesisReady | TranscriptionReady)
_Work = TypeVar("_Work", bound=Child)


class AudioBackend(EngineBackend, Generic[_Ready, _Work]):
    """The engines of a model of speech. `purpose` says in errors what it does, and where.

    A ticket has one child, which keeps to one replica whatever it sends: it counts there with the bytes of its upload.
    """

    purpose: str
    task: str
    paths: Sequence[str]
    chats = False
    unit: Unit  # of the queue's second bound
    child_type: type[_Work]

    def __init__(
        self,
        config: ModelConfig,
        server: ServerStats,
        stats: ModelStats,
        *,
        request_timeout_s: float,
        class_shares: Sequence[int] = EQUAL_SHARES,
    ) -> None:
        super().__init__(config, server, stats)
        self.workers = AudioWorkers()
        max_units = config.max_queue_audio_s if self.unit is AUDIO_S else config.max_queue_chars
        queue = RequestQueue(
            self.task,
            stats,
            Admission(max_queue=config.max_queue, max_units=max_units, max_num_seqs=_RUNNING_REQUESTS, unit=self.unit),
            slots=_RUNNING_REQUESTS,
            shares=class_shares,
        )
        self.tickets: OpenTickets[_Work] = OpenTickets(
            stats, lambda message, replica: self._send(message, replica), queue, request_timeout_s
        )
        self._ready: _Ready | None = None

    def open(self, engine: _Ready, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        self._ready, self._created = engine, created

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""
        self._loaded()

    def _loaded(self) -> _Ready:
        return self._when_ready(self._ready)

    def on_message(self, replica: int, message: FromEngine) -> None:
        """Handle a message of a replica's engine to this process."""
        if isinstance(message, SynthesisOutputs | TranscriptionOutputs):
            self._server_stats.record_cpu_time()
            self.stats.record_step(shared_stats(message.stats), message.step_ended_s, replica)
            for output in message.outputs:
                self.on_output(replica, output)
        elif isinstance(message, ProfileDone):
            self._on_profile_done(replica, message)

    @abstractmethod
    def on_output(self, replica: int, output: Any) -> None:
        """Handle the output of a request; what a lost replica sends of one that another works on is to be dropped."""

    async def close_workers(self) -> None:
        """End the processes of this backend."""
        await self.workers.close()

    @asynccontextmanager
    async def admitted(self, upload_bytes: int, units: float) -> AsyncIterator[_Work]:
        """Wait for a request's turn, and count it from its admission to its end. Yields its child at an engine.

        units: of the queue's second bound. Raises RequestError: 429 when the queue is full, 503, 504 after the limit.
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
        async with self.tickets.admitted(ticket, self.config.priority_class, units=units, cost=max(1.0, units)):
            yield child
        self.stats.finish(
            "stop", prompt_tokens=0, arrived_s=ticket.arrived_s, first_token_s=None, now_s=time.monotonic(), times=None
        )


def check_audio_packages() -> None:
    """Raise ConfigError unless the packages that read uploads are installed."""
    packages = ("python_multipart", "regex", "sacremoses", "sentencepiece", "soundfile", "soxr", "yaml")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"speech models need {', '.join(missing)}: pip install 'meltcore[audio,engine]'")
