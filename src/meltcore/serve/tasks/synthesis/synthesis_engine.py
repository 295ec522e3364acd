"""The backend of a speech synthesizer whose engines Meltcore runs, as one API server process uses it."""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from meltcore.audio.messages import DecodedClip
from meltcore.audio.pool import AudioEncoders, EncodedFile, missing_package
from meltcore.common.errors import RequestError
from meltcore.protocol.synthesis import SynthesisReady, Synthesize, Synthesized
from meltcore.serve.requests.admission import CHARS
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.serve.tasks.audio_backend import AudioBackend
from meltcore.serve.tasks.synthesis.forms import SpokenPart, SynthesisRequest
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.synthesis.voices import find_voice

# Of float32 samples that wait in this process for slow clients: 3 hours at 24 kHz. A request that goes beyond it ends.
_MAX_WAITING_BYTES = 2**30
_SAMPLE_BYTES = 4
# Of IndicF5. Its texts show their language by their letters; clients of dwani.ai name it all the same.
_LANGUAGES = ("as", "bn", "gu", "hi", "kn", "ml", "mr", "or", "pa", "ta", "te")
_INT16_RANGE = 32_768
_ERROR_BY_FINISH_REASON = {
    "abort": ("the engine ended the request", 500, None),
    "deadline": (
        "the request waited longer than --request-timeout, or timeouts.request_s of a fleet",
        504,
        "request_timeout",
    ),
    "error": ("the engine refused the request", 400, None),
}


class _Speech(Child):
    """A text that a replica speaks. Its queue has the results, or the error that ends it.

    A result of None means that another replica begins the text again. Results before it do not count.
    """

    def __init__(self, ticket: Ticket[_Speech], cost: int) -> None:
        super().__init__(ticket, cost)
        self.message: Synthesize | None = None  # once it is sent
        self.has_sent = False  # speech to its client
        self.is_ended = False  # in the engine
        self.results: asyncio.Queue[Synthesized | RequestError | None] = asyncio.Queue()
        self.waiting_bytes = 0  # of the results' samples

    @property
    def needs_replica(self) -> bool:
        """Whether the replica has not yet sent all results."""
        return not self.is_ended

    @property
    def can_retry(self) -> bool:
        """Whether the replica has not yet sent all results, and the client has received no speech yet."""
        return not (self.is_ended or self.has_sent)

    def messages(self) -> Sequence[Synthesize]:
        """Return the message with the text, or no message before the text was sent."""
        return [] if self.message is None else [self.message]

    def open_ids(self) -> Sequence[str]:
        """Return the id of the text while the engine still works on it."""
        return [] if self.message is None or self.is_ended else [self.request_id]

    def restart(self) -> None:
        """Discard the results that were not encoded yet, and put None into the queue, because the text begins again."""
        while not self.results.empty():
            self.results.get_nowait()
        self.waiting_bytes = 0
        self.results.put_nowait(None)


class SynthesisEngine(AudioBackend[_Speech]):
    """Sends texts to a replica. Worker processes encode the chunks of speech as they arrive."""

    purpose = "synthesizes speech: POST /v1/audio/speech"
    unit = CHARS
    child_type = _Speech

    def __init__(
        self, name: str, config: ModelSection, server: ServerStats, stats: ModelStats, **settings: Any
    ) -> None:
        super().__init__(name, config, server, stats, **settings)
        self._encoders = AudioEncoders()
        self._warm_up: asyncio.Task[None] | None = None

    def open(self, text: None, engine: SynthesisReady, created: int) -> None:
        """Register the loaded model, and start the processes that encode its speech."""
        super().open(text, engine, created)
        importlib.import_module("numpy")  # takes 0.1 s, which the first request should not wait for
        self._warm_up = asyncio.create_task(self._encoders.warm_up(engine.sample_rate))

    @property
    def languages(self) -> Sequence[str]:
        """The languages that the model speaks, by code. The mapping is empty before the model is loaded."""
        return _LANGUAGES if self._ready is not None else ()

    async def close_workers(self) -> None:
        """End the processes that encode speech."""
        if self._warm_up is not None:
            self._warm_up.cancel()
        await asyncio.gather(super().close_workers(), self._encoders.close())

    @property
    def _waiting_bytes(self) -> int:
        """The bytes of speech, over all texts, that slow clients have not read yet."""
        return sum(speech.waiting_bytes for speech in self.tickets)

    def on_output(self, replica: int, output: Synthesized) -> None:
        """Pass a result to the text to which it belongs."""
        speech = self.tickets.find(output.request_id, replica)
        if speech is None:
            return
        speech.is_ended = output.finish_reason is not None
        if (waiting_bytes := self._waiting_bytes) + len(output.samples) > _MAX_WAITING_BYTES:
            reason = f"the client reads too slowly: {waiting_bytes} bytes of speech wait in this process"
            speech.results.put_nowait(RequestError(reason, status=503, code="client_too_slow"))
            return
        speech.waiting_bytes += len(output.samples)
        speech.results.put_nowait(output)

    async def synthesize(self, request: SynthesisRequest, on_part: Callable[[SpokenPart], Awaitable[None]]) -> float:
        """Pass the parts of an audio file to `on_part` as they are spoken. Return the duration of the file in seconds.

        Raises RequestError: 400 if the model cannot speak the text, 429 if the queue is full, 500 if the engine fails,
        and 504 after the time limit. Cancelling the call ends the work.
        """
        ready: SynthesisReady = self._loaded()
        voice = _checked(request, ready)
        upload_bytes = len(request.reference or b"") + len(request.text.encode())
        async with self.admitted(upload_bytes, len(request.text)) as speech:
            reference = await self._samples(request.reference, ready) if request.reference is not None else b""
            now_s = time.monotonic()
            message = Synthesize(
                request_id=speech.request_id,
                priority=speech.ticket.priority,
                arrived_s=now_s,
                deadline_s=now_s + speech.ticket.exchange.limit_s(self.tickets.limit_s),
                text=request.text,
                voice=voice,
                reference=reference,
                reference_text=request.reference_text,
                speed=request.speed,
                seed=request.seed,
                num_steps=request.num_steps or 0,
            )
            self.tickets.send(speech, message)
            speech.message, num_bytes = message, None
            while num_bytes is None:  # again from the first chunk where it is retried
                async with self._encoders.open(
                    request.response_format, ready.sample_rate, is_whole=request.is_whole
                ) as file:
                    num_bytes = await self._encode(speech, file, on_part)
            return num_bytes / _SAMPLE_BYTES / ready.sample_rate

    async def _encode(
        self, speech: _Speech, file: EncodedFile, on_part: Callable[[SpokenPart], Awaitable[None]]
    ) -> int | None:
        """Encode the chunks of a text as they arrive, and pass them to `on_part`.

        Return the number of bytes of samples. Returns None if another replica begins the text again.
        """
        num_bytes, is_last = 0, False
        while not is_last:
            replica = speech.replica
            result = await speech.results.get()
            if result is None:
                return None
            if isinstance(result, RequestError):
                raise result
            speech.waiting_bytes -= len(result.samples)
            if result.finish_reason in _ERROR_BY_FINISH_REASON:
                reason, status, code = _ERROR_BY_FINISH_REASON[result.finish_reason]
                raise RequestError(result.error or reason, status=status, code=code)
            num_bytes += len(result.samples)
            is_last = result.finish_reason is not None
            data = await file.add(result.samples, is_last=is_last)
            if speech.replica != replica:
                continue  # the mark that it begins again waits in the queue
            if data or is_last:
                speech.has_sent = True
                await on_part(SpokenPart(data, is_last))
        return num_bytes

    async def _samples(self, file: bytes, ready: SynthesisReady) -> bytes:
        """Return an uploaded reference as float32 samples. Raises RequestError (400)."""
        parts = self.workers.decode(
            file,
            sample_rate=ready.sample_rate,
            max_clip_s=ready.max_reference_s + 1,  # one clip, which is never cut
            max_audio_s=ready.max_reference_s,
        )
        try:
            clips = [part.samples async for part in parts if isinstance(part, DecodedClip)]
        except RequestError as error:
            raise RequestError(f"reference: {error.message}", param="reference", code=error.code) from error
        import numpy as np  # API servers of other models do without it

        samples = np.frombuffer(b"".join(clips), np.int16).astype(np.float32) / _INT16_RANGE
        if len(samples) < ready.min_reference_s * ready.sample_rate:
            raise RequestError(
                f"reference: the audio has {len(samples) / ready.sample_rate:.2f} s; at least "
                f"{ready.min_reference_s:g} s are needed",
                param="reference",
                code="invalid_audio",
            )
        return samples.tobytes()

    def facts(self, ready: SynthesisReady) -> dict[str, Any]:
        """Return the fields for the model card that clients and measurements need."""
        return {
            "languages": self.languages,
            "voices": ready.voices,
            "sample_rate": ready.sample_rate,
            "max_text": ready.max_text,
            "max_reference_s": ready.max_reference_s,
            "steps": ready.steps,
            "tokenizer": ready.tokens,
        }


def _checked(request: SynthesisRequest, ready: SynthesisReady) -> str:
    """Check a request. Return the name of its voice as the engine knows it, or "" if the request has a reference.

    Raises RequestError (400) if the model cannot speak the request.
    """
    for name, text in (("input", request.text), ("reference_text", request.reference_text)):
        if len(text) > ready.max_text:
            raise RequestError(f"{name} has {len(text):,} characters; the limit is {ready.max_text:,}", param=name)
    if not ready.min_speed <= request.speed <= ready.max_speed:
        raise RequestError(
            f"speed must be {ready.min_speed:g} to {ready.max_speed:g}; got {request.speed:g}", param="speed"
        )
    if request.num_steps is not None and request.num_steps not in ready.steps:
        steps = ", ".join(map(str, ready.steps))
        raise RequestError(f"num_steps must be one of {steps}; got {request.num_steps}", param="num_steps")
    if (missing := missing_package(request.response_format)) is not None:
        raise RequestError(
            f"response_format {request.response_format} is not built in: this server lacks {missing}",
            param="response_format",
        )
    if request.reference is not None:
        return ""
    if request.voice is not None:
        return find_voice(request.voice, ready.voices)
    if not ready.voices:
        raise RequestError(
            "this model has no voices: upload one as the file reference, with its reference_text", param="voice"
        )
    return ready.voices[0]
