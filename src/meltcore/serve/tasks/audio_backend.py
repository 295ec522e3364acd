"""What the backends of transcription and synthesis share: admission, the time limit, and refused routes."""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Generic, Literal, TypeVar

from meltcore.audio.pool import AudioWorkers
from meltcore.common.errors import ConfigError, RequestError
from meltcore.protocol.engines import FromEngine, ToEngine, shared_stats
from meltcore.protocol.shell import ProfileDone
from meltcore.protocol.synthesis import SynthesisOutputs, SynthesisReady
from meltcore.protocol.transcription import TranscriptionOutputs, TranscriptionReady
from meltcore.serve.engines.engine_backend import EngineBackend
from meltcore.serve.requests.admission import AUDIO_S, Admission, Unit
from meltcore.serve.requests.fair_queue import Waiting
from meltcore.serve.requests.generation import Generation
from meltcore.serve.requests.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meltcore.serve.requests.request_queue import ENGINE_PRIORITY, EQUAL_SHARES, RequestQueue
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.requests.terms import MODEL_ASLEEP, RequestTerms, current_terms
from meltcore.settings.config import ModelConfig

# Uploads of open requests in this process. Beyond it requests are refused: memory stays bounded.
_MAX_UPLOADS_BYTES = 2**30
# Requests that the admission counts as running; more are in the queue.
_RUNNING_REQUESTS = 64


_Ready = TypeVar("_Ready", bound=SynthesisReady | TranscriptionReady)


@dataclass(eq=False)
class Place:
    """A request's place in the queue, and at a replica once its turn has come. `error`: of one that has ended."""

    waiting: Waiting
    turn: asyncio.Future[None]
    upload_bytes: int
    terms: RequestTerms
    replica: int = 0
    is_retried: bool = False
    error: RequestError | None = None

    @property
    def priority(self) -> int:
        """Of the request's messages to the engine."""
        return ENGINE_PRIORITY[self.waiting.priority_class]


class AudioBackend(EngineBackend, Generic[_Ready]):
    """The engines of a model of speech. `purpose` says in errors what it does, and where."""

    purpose: str
    task: str
    chats = False
    unit: Unit  # of the queue's second bound

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
        self.limit_s = request_timeout_s
        max_units = config.max_queue_audio_s if self.unit is AUDIO_S else config.max_queue_chars
        self._queue = RequestQueue(
            self.task,
            stats,
            Admission(max_queue=config.max_queue, max_units=max_units, max_num_seqs=_RUNNING_REQUESTS, unit=self.unit),
            slots=_RUNNING_REQUESTS,
            shares=class_shares,
        )
        self._ready: _Ready | None = None
        self._numbers = itertools.count()  # of requests to the engine
        self._places: set[Place] = set()  # of the open requests
        self._upload_bytes = 0

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
    async def admitted(self, upload_bytes: int, units: float) -> AsyncIterator[Place]:
        """Wait for a request's turn, and count it from its admission to its end. Yields its place at an engine.

        units: of the queue's second bound. Raises RequestError: 429 when the queue is full, 503, 504 after the limit.
        """
        arrived_s, terms = time.monotonic(), current_terms()
        place = self._admit(upload_bytes, units, terms)
        outcome: Literal["finished", "aborted", "failed"] = "aborted"
        try:
            async with terms.timeout(self.limit_s):
                await place.turn
                yield place
            outcome = "finished"
            self.stats.finish(
                "stop", prompt_tokens=0, arrived_s=arrived_s, first_token_s=None, now_s=time.monotonic(), times=None
            )
        except RequestError as error:
            is_overdue = error.status == 504 or error.code == MODEL_ASLEEP
            outcome = "failed" if error.status >= 500 and not is_overdue else "aborted"
            if is_overdue and place.waiting.is_held:
                self.stats.add(f"refused_deadline/{place.waiting.priority_class}")
            raise
        finally:
            self._places.discard(place)
            self._upload_bytes -= upload_bytes
            if place.waiting.is_held:
                self._queue.leave(place.waiting)
            else:
                self.stats.unassign(place.replica, upload_bytes)
            self.stats.add(outcome)
            self.stats.set("in_flight", len(self._places))
            self._queue.ended(place.waiting, place.waiting.cost)

    def end_places(self, error: RequestError, replica: int | None) -> None:
        """End the requests that wait for their turn, which are no replica's, and the next messages of the others."""
        for place in self._places:
            if not place.waiting.is_held and replica in (None, place.replica):
                place.error = error
            if replica is None and not place.turn.done():
                place.turn.set_exception(error)

    def retry(self, replica: int, others: Sequence[int]) -> None:
        """Send requests of a lost replica to others: those that have sent no output to their clients, once each."""
        for place in self._places:
            if place.waiting.is_held or place.replica != replica or place.is_retried or not self.can_retry(place):
                continue
            place.is_retried = True
            place.terms.retries += 1
            self.stats.add("retried")
            self.stats.unassign(replica, place.upload_bytes)
            place.replica = min(others, key=self.stats.open_tokens)
            self.stats.assign(place.replica, place.upload_bytes)
            self.send_again(place, replica)

    @abstractmethod
    def can_retry(self, place: Place) -> bool:
        """Return whether the client gets the same answer where the work in progress begins again."""

    @abstractmethod
    def send_again(self, place: Place, lost_replica: int) -> None:
        """Send what is in progress of a request to its new replica; `lost_replica` may be out of reach only."""

    def send_for(self, place: Place, message: ToEngine) -> None:
        """Send a message to the replica of a request. Raises RequestError where that is lost."""
        if place.error is not None:
            raise place.error
        self._send(message, place.replica)

    def _admit(self, upload_bytes: int, units: float, terms: RequestTerms) -> Place:
        """Count a request that begins. Raises RequestError (429, 503)."""
        stats = self.stats
        self._live_replicas()
        if self._upload_bytes and self._upload_bytes + upload_bytes > _MAX_UPLOADS_BYTES:
            stats.add("rejected_queue_full")
            raise RequestError(
                f"the queue is full: uploads of {self._upload_bytes + upload_bytes} bytes would wait, "
                f"the limit is {_MAX_UPLOADS_BYTES}",
                status=429,
                code="queue_full",
            )

        def accept() -> None:
            stats.add("accepted")
            self._places.add(place)
            self._upload_bytes += upload_bytes
            stats.set_in_flight(len(self._places))

        def start() -> None:
            # Without a living one: the message of the last one's death, which is on its way, ends the request.
            place.replica = min(stats.live_replicas() or [0], key=stats.open_tokens)
            stats.assign(place.replica, upload_bytes)
            if not place.turn.done():  # its task may be about to end it
                place.turn.set_result(None)

        priority_class = terms.class_of(self.config.priority_class)
        waiting = Waiting(priority_class, start, units=units, cost=max(1.0, units))
        place = Place(waiting, asyncio.get_running_loop().create_future(), upload_bytes, terms)
        self._queue.admit(waiting, accept)
        return place

    # --- the other routes

    async def submit(self, request: ChatRequest | CompletionRequest, generation: Generation) -> None:  # noqa: ARG002
        """Refuse to generate text."""
        raise self._no_text()

    def release(self, generation: Generation, error: RequestError | None = None) -> None:
        """Do nothing: there are no generations."""

    async def tokenize(self, request: TokenizeRequest) -> dict[str, Any]:  # noqa: ARG002 - as the protocol has it
        """Refuse to tokenize."""
        raise self._no_text()

    async def detokenize(self, request: DetokenizeRequest) -> dict[str, Any]:  # noqa: ARG002 - as the protocol has it
        """Refuse to detokenize."""
        raise self._no_text()

    def _no_text(self) -> RequestError:
        return RequestError(f"the model {self.names[0]} {self.purpose}", param="model")


def check_audio_packages() -> None:
    """Raise ConfigError unless the packages that read uploads are installed."""
    packages = ("python_multipart", "regex", "sacremoses", "sentencepiece", "soundfile", "soxr", "yaml")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"speech models need {', '.join(missing)}: pip install 'meltcore[audio,engine]'")
