"""The backend of a speech recognizer whose engines run on this machine, as one API server process sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from meltcore.api.admission import Admission
from meltcore.api.generation import Generation
from meltcore.api.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from meltcore.api.speech import SpeechRequest
from meltcore.api.stats import ModelStats, ServerStats
from meltcore.audio.messages import Decoded
from meltcore.audio.pool import AudioWorkers
from meltcore.backends.engine_backend import EngineBackend
from meltcore.config import ModelConfig
from meltcore.errors import ConfigError, RequestError
from meltcore.protocol.engines import FromEngine, shared_stats
from meltcore.protocol.shell import AbortRequests, ProfileDone
from meltcore.protocol.transcription import Transcribe, Transcript, TranscriptionOutputs, TranscriptionReady
from meltcore.text.transcripts import SpokenWord, Transcription, model_language, words_from

MAX_AUDIO_S = 4 * 3600.0
# Clips of one file in the engine. More wait in the audio worker, so a file of hours takes little memory.
_MAX_OPEN_CLIPS = 16
# Uploads of open requests in this process. Beyond it requests are refused: memory stays bounded.
_MAX_UPLOADS_BYTES = 2**30
# Requests that the admission counts as running; more are in the queue.
_RUNNING_REQUESTS = 64


class _OpenClip(NamedTuple):
    """A clip in the engine: its replica, and the future of its transcript."""

    replica: int
    done: asyncio.Future[Transcript]


class TranscriptionEngine(EngineBackend):
    """Decodes uploads in worker processes, sends their clips to a replica, and joins the transcripts."""

    def __init__(
        self, config: ModelConfig, server: ServerStats, stats: ModelStats, *, request_timeout_s: float
    ) -> None:
        super().__init__(config, server, stats)
        self.workers = AudioWorkers()
        self._limit_s = request_timeout_s
        self._ready: TranscriptionReady | None = None
        self._created = 0
        self._admission = Admission(
            max_queue=config.max_queue, max_queue_tokens=config.max_queue_tokens, max_num_seqs=_RUNNING_REQUESTS
        )
        self._clips: dict[str, _OpenClip] = {}
        self._num_clips = 0
        self._open_requests = 0
        self._upload_bytes = 0

    def open(self, engine: TranscriptionReady, created: int) -> None:
        """Register the loaded model. Requests are accepted once the status is set to "ready"."""
        self._ready, self._created = engine, created

    def check_ready(self) -> None:
        """Raise RequestError (503) while no request can be served."""
        self._when_ready(self._ready)

    def end_all(self, error: RequestError, outcome: Literal["aborted", "failed"], replica: int | None = None) -> None:  # noqa: ARG002 - counted where the request ends
        """End every open request, or every one of `replica`, with an error."""
        for clip in self._clips.values():
            if (replica is None or clip.replica == replica) and not clip.done.done():
                clip.done.set_exception(error)

    def on_message(self, replica: int, message: FromEngine) -> None:
        """Handle a message of a replica's engine to this process."""
        if isinstance(message, TranscriptionOutputs):
            self._server_stats.record_cpu_time()
            self.stats.record_step(shared_stats(message.stats), message.step_ended_s, replica)
            for transcript in message.outputs:
                clip = self._clips.get(transcript.request_id)
                if clip is not None and not clip.done.done():
                    clip.done.set_result(transcript)
        elif isinstance(message, ProfileDone):
            self._on_profile_done(replica, message)

    async def transcribe(
        self,
        request: SpeechRequest,
        request_id: str,
        on_words: Callable[[list[SpokenWord]], None] = lambda _words: None,
    ) -> Transcription:
        """Return the words of a file. on_words: receives those of each clip, in order, as they are known.

        Raises RequestError: 400 for audio or a language that cannot be served, 429 when the queue is full, 500 when the
        engine fails, 504 after the time limit. Cancelling it ends its work.
        """
        ready = self._when_ready(self._ready)
        language = model_language(request.language, ready.languages)
        arrived_s = time.monotonic()
        replica = self._admit(len(request.data))
        outcome: Literal["finished", "aborted", "failed"] = "aborted"
        try:
            async with asyncio.timeout(self._limit_s):
                prefix = f"{request_id}-{self._num_clips}"
                result = await self._transcribe(request, prefix, language, ready, replica, on_words)
            outcome = "finished"
            self.stats.finish(
                "stop", prompt_tokens=0, arrived_s=arrived_s, first_token_s=None, now_s=time.monotonic(), times=None
            )
            return result
        except TimeoutError as error:
            message = f"the answer took longer than {self._limit_s:g} s (--request-timeout)"
            raise RequestError(message, status=504, code="request_timeout") from error
        except RequestError as error:
            outcome = "failed" if error.status >= 500 else "aborted"
            raise
        finally:
            self._release(replica, len(request.data), outcome)

    async def _transcribe(
        self,
        request: SpeechRequest,
        prefix: str,
        language: str,
        ready: TranscriptionReady,
        replica: int,
        on_words: Callable[[list[SpokenWord]], None],
    ) -> Transcription:
        """Send the file's clips as they are decoded, a bounded number ahead of their transcripts."""
        starts: list[float] = []
        clips: list[tuple[str, asyncio.Future[Transcript]]] = []
        words: list[SpokenWord] = []
        duration_s, num_read = 0.0, 0
        parts = self.workers.decode(
            request.data,
            sample_rate=ready.sample_rate,
            max_clip_s=ready.max_samples / ready.sample_rate,
            max_audio_s=MAX_AUDIO_S,
        )
        try:
            async with aclosing(parts):
                async for part in parts:
                    if isinstance(part, Decoded):
                        duration_s = part.duration_s
                        continue
                    starts.append(part.start / ready.sample_rate)
                    clips.append(
                        self._send_clip(f"{prefix}-{len(clips)}", part.samples, language, request, ready, replica)
                    )
                    if len(clips) - num_read >= _MAX_OPEN_CLIPS:
                        words += await self._read(clips[num_read], starts[num_read], on_words)
                        num_read += 1
            for index in range(num_read, len(clips)):
                words += await self._read(clips[index], starts[index], on_words)
            return Transcription(words, duration_s, language)
        finally:
            unfinished = [clip_id for clip_id, future in clips if clip_id in self._clips and not future.done()]
            for clip_id, _ in clips:
                self._clips.pop(clip_id, None)
            if unfinished and replica in self.stats.live_replicas():
                self._send(AbortRequests(unfinished), replica)

    def _send_clip(
        self,
        clip_id: str,
        samples: bytes,
        language: str,
        request: SpeechRequest,
        ready: TranscriptionReady,
        replica: int,
    ) -> tuple[str, asyncio.Future[Transcript]]:
        self._num_clips += 1
        done: asyncio.Future[Transcript] = asyncio.get_running_loop().create_future()
        self._clips[clip_id] = _OpenClip(replica, done)
        # Silence fills up the last clip of a file, which may be too short for the model.
        padding = bytes(max(0, 2 * ready.min_samples - len(samples)))
        decoder: Literal["ctc", "rnnt"] = "ctc" if request.decoder == "ctc" else "rnnt"
        message = Transcribe(
            request_id=clip_id,
            samples=samples + padding,
            language=language,
            decoder=decoder,
            arrived_s=time.monotonic(),
        )
        self._send(message, replica)
        return clip_id, done

    async def _read(
        self,
        clip: tuple[str, asyncio.Future[Transcript]],
        start_s: float,
        on_words: Callable[[list[SpokenWord]], None],
    ) -> list[SpokenWord]:
        """Wait for a clip's transcript; returns its words with times from the beginning of the file."""
        clip_id, done = clip
        transcript = await done
        self._clips.pop(clip_id, None)
        if transcript.finish_reason != "stop":
            raise RequestError(transcript.error or "the engine ended the request", status=500)
        words = words_from(start_s, transcript.words)
        on_words(words)
        return words

    def _admit(self, upload_bytes: int) -> int:
        """Count a request that begins; returns its replica. Raises RequestError (429, 503)."""
        stats, live = self.stats, self.stats.live_replicas()
        if not live:
            self.check_ready()
            raise RequestError(self.health.reason, status=503, code="not_ready")
        with stats.shared.locked():  # the limits are those of all API servers together
            in_flight = round(stats.total("in_flight"))
            try:
                self._admission.check(requests=1, replicas=len(live), tokens=0, in_flight=in_flight, waiting_tokens=0)
                if self._upload_bytes and self._upload_bytes + upload_bytes > _MAX_UPLOADS_BYTES:
                    raise RequestError(
                        f"the queue is full: uploads of {self._upload_bytes + upload_bytes} bytes would wait, "
                        f"the limit is {_MAX_UPLOADS_BYTES}",
                        status=429,
                        code="queue_full",
                    )
            except RequestError:
                stats.add("rejected_queue_full")
                raise
            replica = min(live, key=stats.open_tokens)
            stats.assign(replica, upload_bytes)
            stats.add("accepted")
            self._open_requests += 1
            self._upload_bytes += upload_bytes
            stats.set_in_flight(self._open_requests)
        return replica

    def _release(self, replica: int, upload_bytes: int, outcome: str) -> None:
        self._open_requests -= 1
        self._upload_bytes -= upload_bytes
        self.stats.unassign(replica, upload_bytes)
        self.stats.add(outcome)
        self.stats.set("in_flight", self._open_requests)

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

    def model_card(self, name: str) -> dict[str, Any]:
        """Return OpenAI's model card with the facts that a measurement must record."""
        ready = self._when_ready(self._ready)
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "meltcore",
            "task": ready.task,
            "languages": ready.languages,
            "max_clip_s": ready.max_samples / ready.sample_rate,
            "weights": ready.weights,
            "tokenizer": ready.tokens,
            "device": ready.device,
            "dtype": ready.dtype,
            "replicas": self.config.data_parallel_size,
        }

    def _no_text(self) -> RequestError:
        return RequestError(
            f"the model {self.names[0]} transcribes speech: POST /v1/audio/transcriptions", param="model"
        )


def check_audio_packages() -> None:
    """Raise ConfigError unless the packages that read uploads are installed."""
    packages = ("python_multipart", "regex", "sacremoses", "sentencepiece", "soundfile", "soxr", "yaml")
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ConfigError(f"speech recognition needs {', '.join(missing)}: pip install 'meltcore[audio,engine]'")
