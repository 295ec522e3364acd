"""Defines the forms of requests for transcripts and the interface of their backends, and chooses the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeGuard

from meltcore.serve.tasks.model_choice import ModelChoice, SpokenBackend
from meltcore.text.transcripts import SpokenWord, Transcription

ResponseFormat = Literal["json", "text", "srt", "vtt", "verbose_json"]


class SpeechRequest(NamedTuple):
    """The fields of a transcription request. `language` is the name that the client sent."""

    data: bytes
    model: str | None
    language: str | None
    response_format: ResponseFormat
    granularities: frozenset[str]
    decoder: str
    is_streamed: bool
    user: str | None


class SpeechBackend(SpokenBackend, Protocol):
    """A backend whose model transcribes speech."""

    async def transcribe(
        self, request: SpeechRequest, on_words: Callable[[list[SpokenWord]], None] = ...
    ) -> Transcription:
        """Return the words of an audio file.

        As soon as the words of a clip are known, `on_words` receives them. Clips are in order. Cancelling the call ends
        the work. Raises RequestError if the file cannot be transcribed.
        """


def transcriber(choices: ModelChoice, request: SpeechRequest) -> tuple[SpeechBackend, SpeechRequest]:
    """Return a model that transcribes speech, and the request with the name of the language for this model.

    Raises RequestError (400, 404, 503).
    """
    models = choices.languages.transcription
    backend, known = choices.by_language(_transcribes, "transcribe speech", models, request.language, request.model)
    return backend, request if known is None else request._replace(language=known)


def _transcribes(backend: object) -> TypeGuard[SpeechBackend]:
    return hasattr(backend, "transcribe")
