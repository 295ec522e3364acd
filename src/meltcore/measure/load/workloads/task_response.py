"""Reads one answer of the APIs of translation, transcription and synthesis into a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec

from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.wire.response import BadJsonError, BaseResponse, decode_json, whole_count, whole_text
from meltcore.measure.load.workloads.wav import WavReader

MAX_JSON_BYTES = 16 * 2**20  # a transcript of three hours has 0.2 MB
# OpenAI's `pcm` has no header: 16-bit mono at 24 kHz.
PCM_BYTES_PER_S = 48_000

SpeechFormat = Literal["wav", "pcm"]
Failure = tuple[str | None, str | None]
COMPLETE: Failure = (None, None)


class _Usage(msgspec.Struct):
    prompt_tokens: int | float | None = None


class _Translations(msgspec.Struct):
    translations: list[str]
    usage: _Usage | None = None


class _Transcript(msgspec.Struct):
    text: str


class _JsonResponse(BaseResponse):
    """Reads an answer that is one JSON document."""

    __slots__ = ("_content", "_keep_text", "_num_bytes", "_parts")

    CONTENT_TYPES = ("application/json",)
    WRONG_TYPE_FAILURE = "not JSON"

    def __init__(
        self,
        record: RequestRecord,
        on_done: Callable[[Any], None],
        *,
        keep_text: bool,
        max_output_tokens: int | None = None,
    ) -> None:
        """Read into `record`. `max_output_tokens` is that of generation: tasks report no output tokens."""
        del max_output_tokens
        super().__init__(record, on_done)
        self._keep_text = keep_text
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._content = ""
        record.saw_usage = False

    @property
    def content(self) -> str:
        """Return the text of the answer, where it was to be kept."""
        return self._content

    def on_body(self, data: bytes) -> None:
        """Collect the answer, or the body of an error response."""
        if self.record.status != 200:
            super().on_body(data)
            return
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_JSON_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()
            self._finish("malformed response", f"the answer is longer than {MAX_JSON_BYTES:,} bytes")

    def _find_failure(self) -> Failure:
        data = b"".join(self._parts)
        try:
            texts, failure = self._read(data)
        except BadJsonError as error:
            return "bad json", f"{error}: {data[:80]!r}"
        if all(texts):
            self.record.first_text_s = self.now_s
        if self._keep_text:
            self._content = whole_text("\n".join(texts))
        return failure

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        """Return the texts of the answer and its failure. Raises BadJsonError for another document."""
        raise NotImplementedError


class TranslationResponse(_JsonResponse):
    """Reads the answer of POST /v1/translate: as many translations as the request has sentences.

    Where the server reports `usage`, the record gets its count of source tokens.
    """

    __slots__ = ()

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        answer = decode_json(_translations_decoder, data)
        num_sentences = 0 if self.record.work is None else self.record.work.sentences
        if len(answer.translations) != num_sentences:
            return [], ("wrong answer", f"{len(answer.translations)} translations of {num_sentences} sentences")
        prompt_tokens = None if answer.usage is None else whole_count(answer.usage.prompt_tokens)
        if prompt_tokens is not None:
            self.record.prompt_tokens, self.record.saw_usage = prompt_tokens, True
            if self.record.prompt_tokens <= 0:
                return [], ("implausible usage", f"prompt_tokens {self.record.prompt_tokens}")
        return answer.translations, COMPLETE


class TranscriptionResponse(_JsonResponse):
    """Reads the answer of POST /v1/audio/transcriptions in the format `json`. An empty transcript is complete."""

    __slots__ = ()

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        return [decode_json(_transcript_decoder, data).text], COMPLETE


class SpeechResponse(BaseResponse):
    """Reads the answer of POST /v1/audio/speech and measures its audio, of which it keeps nothing."""

    __slots__ = ("_first_audio_s", "_pcm_bytes", "_wav")

    CONTENT_TYPES = ("audio/", "application/octet-stream")
    WRONG_TYPE_FAILURE = "not audio"

    def __init__(
        self,
        record: RequestRecord,
        on_done: Callable[[Any], None],
        *,
        speech_format: SpeechFormat = "wav",
        keep_text: bool = False,
        max_output_tokens: int | None = None,
    ) -> None:
        """Read into `record`. The last two arguments are those of answers with text, and have no effect."""
        del keep_text, max_output_tokens
        super().__init__(record, on_done)
        self._wav = WavReader() if speech_format == "wav" else None
        self._pcm_bytes = 0
        self._first_audio_s = 0.0

    @property
    def audio_s(self) -> float:
        """Return the seconds of audio that have arrived."""
        return self._pcm_bytes / PCM_BYTES_PER_S if self._wav is None else self._wav.seconds

    def on_body(self, data: bytes) -> None:
        """Measure the audio in `data`, or collect the body of an error response."""
        if self.record.status != 200:
            super().on_body(data)
            return
        if self._wav is None:
            self._pcm_bytes += len(data)
        else:
            self._wav.feed(data)
        if not self._first_audio_s and self.audio_s:
            self._first_audio_s = self.now_s

    def _find_failure(self) -> Failure:
        wav = self._wav
        if wav is not None and wav.problem is not None:
            return "bad audio", wav.problem
        if not self.audio_s:
            return "empty answer", "no audio"
        if wav is not None and wav.missing_bytes:
            return "truncated audio", f"{wav.missing_bytes:,} bytes that the WAV header promises are missing"
        return COMPLETE

    def _complete_record(self) -> None:
        self.record.first_text_s = self._first_audio_s
        self.record.work = TaskWork(audio_s=self.audio_s)


_translations_decoder = msgspec.json.Decoder(_Translations)
_transcript_decoder = msgspec.json.Decoder(_Transcript)
