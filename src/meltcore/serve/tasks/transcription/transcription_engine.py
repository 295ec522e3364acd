"""The backend of a transcription model whose engines Meltcore runs, as one API server process uses it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Literal

from meltcore.audio.messages import Decoded
from meltcore.common.errors import RequestError
from meltcore.protocol.transcription import Transcribe, Transcript, TranscriptionReady
from meltcore.serve.requests.admission import AUDIO_S
from meltcore.serve.requests.ticket import Child, Ticket
from meltcore.serve.tasks.audio_backend import AudioBackend
from meltcore.serve.tasks.transcription.forms import SpeechRequest
from meltcore.text.transcripts import SpokenWord, Transcription, model_language, place_words

MAX_AUDIO_S = 4 * 3600.0
# Clips of one file in the engine. More wait in the audio worker, so a file of hours takes little memory.
_MAX_OPEN_CLIPS = 16
_COMPRESSED_BYTES_PER_S = 4000


def estimated_audio_s(data: bytes) -> float:
    """Return the estimated duration of an audio file in seconds.

    The header of a WAV file gives the duration. Other files are assumed to be compressed to 32 kbit/s. The estimate
    only decides whether a file may wait, before a worker has decoded it.
    """
    bytes_per_s = _COMPRESSED_BYTES_PER_S
    if data[:4] == b"RIFF" and data[8:16] == b"WAVEfmt " and len(data) >= 32:
        bytes_per_s = max(bytes_per_s, int.from_bytes(data[28:32], "little"))
    return len(data) / bytes_per_s


class _Recording(Child):
    """An audio file that a replica transcribes.

    `clips` has the clips at the replica by id: a future of the transcript, and the message with the samples. The
    message is kept only if another replica could retry it, because a request has up to 15 MB of samples.
    """

    def __init__(self, ticket: Ticket[_Recording], cost: int) -> None:
        super().__init__(ticket, cost)
        self.clips: dict[str, tuple[asyncio.Future[Transcript], Transcribe | None]] = {}

    def messages(self) -> Sequence[Transcribe]:
        """Return the messages of the clips that have no transcript yet. The others are never transcribed again."""
        return [message for _, message in self.clips.values() if message is not None]

    def open_ids(self) -> Sequence[str]:
        """Return the ids of the clips that have no transcript yet."""
        return list(self.clips)


class TranscriptionEngine(AudioBackend[_Recording]):
    """Decodes uploads in worker processes, sends the clips to a replica, and joins the transcripts."""

    purpose = "transcribes speech: POST /v1/audio/transcriptions"
    unit = AUDIO_S
    child_type = _Recording

    @property
    def languages(self) -> Sequence[str]:
        """The languages that the model transcribes, by code. The mapping is empty before the model is loaded."""
        return self._ready.languages if self._ready is not None else ()

    def on_output(self, replica: int, output: Transcript) -> None:
        """Resolve the future of the clip to which a transcript belongs."""
        recording = self.tickets.find(output.request_id.rpartition("-")[0], replica)
        if recording is not None and (clip := recording.clips.pop(output.request_id, None)) is not None:
            clip[0].set_result(output)

    async def transcribe(
        self,
        request: SpeechRequest,
        on_words: Callable[[list[SpokenWord]], None] = lambda _words: None,
    ) -> Transcription:
        """Return the words of an audio file.

        As soon as the words of a clip are known, `on_words` receives them. Clips are in order. Cancelling the call ends
        the work. Raises RequestError: 400 if the audio or the language cannot be served, 429 if the queue is full, 500
        if the engine fails, 504 after the limit.
        """
        ready: TranscriptionReady = self._loaded()
        language = model_language(request.language, ready.languages)
        async with self.admitted(len(request.data), estimated_audio_s(request.data)) as recording:
            return await self._transcribe(request, language, ready, recording, on_words)

    async def _transcribe(
        self,
        request: SpeechRequest,
        language: str,
        ready: TranscriptionReady,
        recording: _Recording,
        on_words: Callable[[list[SpokenWord]], None],
    ) -> Transcription:
        """Send the clips of a file to the replica as they are decoded, and return the joined transcript.

        At most _MAX_OPEN_CLIPS clips are at the replica. `on_words` receives the words of each clip, in order.
        """
        start_times_s: list[float] = []
        clips: list[asyncio.Future[Transcript]] = []
        words: list[SpokenWord] = []
        duration_s, num_read = 0.0, 0
        parts = self.workers.decode(
            request.data,
            sample_rate=ready.sample_rate,
            max_clip_s=ready.max_samples / ready.sample_rate,
            max_audio_s=MAX_AUDIO_S,
        )
        async with aclosing(parts):
            async for part in parts:
                if isinstance(part, Decoded):
                    duration_s = part.duration_s
                    continue
                start_times_s.append(part.start / ready.sample_rate)
                clip_id = f"{recording.request_id}-{len(clips)}"
                clips.append(self._send_clip(clip_id, part.samples, language, request, ready, recording))
                if len(clips) - num_read >= _MAX_OPEN_CLIPS:
                    words += await self._read(clips[num_read], start_times_s[num_read], on_words)
                    num_read += 1
        for index in range(num_read, len(clips)):
            words += await self._read(clips[index], start_times_s[index], on_words)
        recording.ticket.cost = max(1.0, duration_s)
        return Transcription(words, duration_s, language)

    def _send_clip(
        self,
        clip_id: str,
        samples: bytes,
        language: str,
        request: SpeechRequest,
        ready: TranscriptionReady,
        recording: _Recording,
    ) -> asyncio.Future[Transcript]:
        future: asyncio.Future[Transcript] = asyncio.get_running_loop().create_future()
        # Silence fills up the last clip of a file, which may be too short for the model.
        padding = bytes(max(0, 2 * ready.min_samples - len(samples)))
        decoder: Literal["ctc", "rnnt"] = "ctc" if request.decoder == "ctc" else "rnnt"
        message = Transcribe(
            request_id=clip_id,
            samples=samples + padding,
            language=language,
            decoder=decoder,
            priority=recording.ticket.priority,
            arrived_s=time.monotonic(),
        )
        self.tickets.send(recording, message)
        recording.clips[clip_id] = future, message if self.stats.replicas > 1 else None
        return future

    async def _read(
        self,
        clip: asyncio.Future[Transcript],
        start_s: float,
        on_words: Callable[[list[SpokenWord]], None],
    ) -> list[SpokenWord]:
        """Wait for the transcript of a clip. Return its words with times in seconds from the beginning of the file."""
        transcript = await clip
        if transcript.finish_reason != "stop":
            raise RequestError(transcript.error or "the engine ended the request", status=500)
        words = place_words(start_s, transcript.words)
        on_words(words)
        return words

    def facts(self, ready: TranscriptionReady) -> dict[str, Any]:
        """Return the fields for the model card that a measurement records."""
        return {
            "languages": ready.languages,
            "max_clip_s": ready.max_samples / ready.sample_rate,
            "tokenizer": ready.tokens,
            "output_lengths": ready.output_lengths,
        }
