"""The backend of a transcription model whose engines run on this machine, as one API server process sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

from meltcore.audio.messages import Decoded
from meltcore.common.errors import RequestError
from meltcore.protocol.shell import AbortRequests
from meltcore.protocol.transcription import Transcribe, Transcript, TranscriptionReady
from meltcore.serve.requests.admission import AUDIO_S
from meltcore.serve.requests.stats import ModelStats, ServerStats
from meltcore.serve.requests.task_backends import SpeechRequest
from meltcore.serve.tasks.audio_backend import AudioBackend, Place
from meltcore.settings.config import ModelConfig
from meltcore.text.transcripts import SpokenWord, Transcription, model_language, words_from

MAX_AUDIO_S = 4 * 3600.0
# Clips of one file in the engine. More wait in the audio worker, so a file of hours takes little memory.
_MAX_OPEN_CLIPS = 16
_COMPRESSED_BYTES_PER_S = 4000


def estimated_audio_s(data: bytes) -> float:
    """Return how many seconds a file seems to have: of WAV by its header, of others as if compressed to 32 kbit/s.

    Whether a file may wait is decided before a worker has decoded it. No field of the header is trusted further.
    """
    bytes_per_s = _COMPRESSED_BYTES_PER_S
    if data[:4] == b"RIFF" and data[8:16] == b"WAVEfmt " and len(data) >= 32:
        bytes_per_s = max(bytes_per_s, int.from_bytes(data[28:32], "little"))
    return len(data) / bytes_per_s


class _OpenClip(NamedTuple):
    """A clip in the engine: the place of its request, what was sent, and the future of its transcript.

    Where there is no other replica, nothing is kept of what was sent: a request has up to 15 MB of it.
    """

    place: Place
    message: Transcribe | None
    done: asyncio.Future[Transcript]


class TranscriptionEngine(AudioBackend[TranscriptionReady]):
    """Decodes uploads in worker processes, sends their clips to a replica, and joins the transcripts."""

    purpose = "transcribes speech: POST /v1/audio/transcriptions"
    task = "transcription"
    unit = AUDIO_S

    def __init__(self, config: ModelConfig, server: ServerStats, stats: ModelStats, **settings: Any) -> None:
        super().__init__(config, server, stats, **settings)
        self._clips: dict[str, _OpenClip] = {}

    @property
    def languages(self) -> Sequence[str]:
        """The languages that it transcribes, by code; none before it is loaded."""
        return self._ready.languages if self._ready is not None else ()

    def end_all(self, error: RequestError, outcome: Literal["aborted", "failed"], replica: int | None = None) -> None:  # noqa: ARG002 - counted where the request ends
        """End every open request, or every one of `replica`, with an error."""
        self.end_places(error, replica)
        for clip in self._clips.values():
            if (replica is None or clip.place.replica == replica) and not clip.done.done():
                clip.done.set_exception(error)

    def can_retry(self, place: Place) -> bool:  # noqa: ARG002 - of no clip a part is sent
        """Return True: only clips without a transcript are sent again, so words that were streamed stay."""
        return True

    def send_again(self, place: Place, lost_replica: int) -> None:
        """Send the clips of a request that have no transcript yet to its new replica."""
        lost = [(name, clip) for name, clip in self._clips.items() if clip.place is place and not clip.done.done()]
        self._send(AbortRequests([name for name, _ in lost]), lost_replica)
        for _, clip in lost:
            assert clip.message is not None
            self._send(clip.message, place.replica)

    def on_output(self, replica: int, output: Transcript) -> None:
        """Give a transcript to its clip; what a lost replica sends of one that another one works on is dropped."""
        clip = self._clips.get(output.request_id)
        if clip is not None and not clip.done.done() and clip.place.replica == replica:
            clip.done.set_result(output)

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
        ready = self._loaded()
        language = model_language(request.language, ready.languages)
        async with self.admitted(len(request.data), estimated_audio_s(request.data)) as place:
            prefix = f"{request_id}-{next(self._numbers)}"  # files of a batch share their request's id
            return await self._transcribe(request, prefix, language, ready, place, on_words)

    async def _transcribe(
        self,
        request: SpeechRequest,
        prefix: str,
        language: str,
        ready: TranscriptionReady,
        place: Place,
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
                        self._send_clip(f"{prefix}-{len(clips)}", part.samples, language, request, ready, place)
                    )
                    if len(clips) - num_read >= _MAX_OPEN_CLIPS:
                        words += await self._read(clips[num_read], starts[num_read], on_words)
                        num_read += 1
            for index in range(num_read, len(clips)):
                words += await self._read(clips[index], starts[index], on_words)
            place.waiting.cost = max(1.0, duration_s)
            return Transcription(words, duration_s, language)
        finally:
            unfinished = [clip_id for clip_id, future in clips if clip_id in self._clips and not future.done()]
            for clip_id, _ in clips:
                self._clips.pop(clip_id, None)
            if unfinished and not self.stats.is_dead(place.replica):
                self._send(AbortRequests(unfinished), place.replica)

    def _send_clip(
        self,
        clip_id: str,
        samples: bytes,
        language: str,
        request: SpeechRequest,
        ready: TranscriptionReady,
        place: Place,
    ) -> tuple[str, asyncio.Future[Transcript]]:
        done: asyncio.Future[Transcript] = asyncio.get_running_loop().create_future()
        # Silence fills up the last clip of a file, which may be too short for the model.
        padding = bytes(max(0, 2 * ready.min_samples - len(samples)))
        decoder: Literal["ctc", "rnnt"] = "ctc" if request.decoder == "ctc" else "rnnt"
        message = Transcribe(
            request_id=clip_id,
            samples=samples + padding,
            language=language,
            decoder=decoder,
            priority=place.priority,
            arrived_s=time.monotonic(),
        )
        self.send_for(place, message)
        self._clips[clip_id] = _OpenClip(place, message if self.stats.replicas > 1 else None, done)
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

    def model_card(self, name: str) -> dict[str, Any]:
        """Return OpenAI's model card with the facts that a measurement must record."""
        ready = self._loaded()
        facts = {
            "task": ready.task,
            "languages": ready.languages,
            "max_clip_s": ready.max_samples / ready.sample_rate,
            "tokenizer": ready.tokens,
            "output_lengths": ready.output_lengths,
        }
        return self._card(name, ready, facts)
