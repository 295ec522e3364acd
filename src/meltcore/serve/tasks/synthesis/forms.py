"""Defines the forms of requests for speech and the interface of their backends, and chooses the model."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Literal, NamedTuple, Protocol, TypeGuard

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.requests.protocol import AudioFormat
from meltcore.serve.tasks.model_choice import ModelChoice, SpokenBackend


class SynthesisRequest(NamedTuple):
    """A request for speech. If a field is None, the model's default is used.

    Args:
        reference: a recording of a voice that says reference_text. It replaces the voices of the model.
        is_whole: whether the answer is one file with its length.
        is_events: whether the answer is a stream of OpenAI's events.
    """

    text: str
    voice: str | None = None
    reference: bytes | None = None
    reference_text: str = ""
    response_format: AudioFormat = "mp3"
    speed: float = 1.0
    seed: int = 0
    num_steps: int | None = None
    is_whole: bool = False
    is_events: bool = False
    language: str | None = None
    model: str | None = None
    user: str | None = None


class SpeechOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The fields that all forms of requests for speech share. If a field is None, the model's default is used."""

    model: str | None = None
    language: str | None = None
    response_format: AudioFormat | None = None
    speed: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    num_steps: int | None = None

    def request(self, text: str, voice: str | None) -> SynthesisRequest:
        """Return the request to speak a text, in the form's language and format."""
        return SynthesisRequest(
            text,
            voice,
            response_format=self.response_format or "mp3",
            speed=1.0 if self.speed is None else self.speed,
            seed=self.seed or 0,
            num_steps=self.num_steps,
            language=self.language,
            model=self.model,
        )


class SynthesisFields(SpeechOptions, forbid_unknown_fields=True, kw_only=True):
    """The fields of POST /v1/audio/speech.

    The last three fields are dwani.ai's names for input, voice and reference_text.
    """

    input: str | None = None
    voice: str | dict[str, str] | None = None  # a name, or OpenAI's {"id": name}
    stream_format: Literal["audio", "sse"] | None = None
    instructions: str | None = None
    reference_text: str | None = None
    user: str | None = None
    text: str | None = None
    ref_audio_name: str | None = None
    ref_text: str | None = None


class SpokenPart(NamedTuple):
    """The next bytes of an audio file, and whether they are the last."""

    data: bytes
    is_last: bool


class SynthesisBackend(SpokenBackend, Protocol):
    """A backend whose model synthesizes speech."""

    async def synthesize(self, request: SynthesisRequest, on_part: Callable[[SpokenPart], Awaitable[None]]) -> float:
        """Pass the parts of an audio file to `on_part` as they are spoken. Return the duration of the file in seconds.

        Raises RequestError if the model cannot speak the text. Cancelling the call ends the work.
        """


async def speak_whole(backend: SynthesisBackend, request: SynthesisRequest) -> bytes:
    """Return the complete audio file in which a text is spoken.

    Raises RequestError if the model cannot speak the text. Cancelling the call ends the work.
    """
    parts: list[bytes] = []

    async def on_part(part: SpokenPart) -> None:
        parts.append(part.data)

    await backend.synthesize(request, on_part)
    return b"".join(parts)


def synthesizer(
    choices: ModelChoice, language: str | None, model: str | None = None, *, param: str = "language"
) -> SynthesisBackend:
    """Return a model that synthesizes speech. `param` is the request's field that names the language.

    Raises RequestError (400, 404, 503).
    """
    backend, known = choices.by_language(
        _synthesizes, "synthesize speech", choices.languages.synthesis, language, model
    )
    if language is None or known is not None:
        return backend
    languages = ", ".join(backend.languages)
    raise RequestError(f"{param} {language[:60]!r} is not one of the model's: {languages}", param=param)


def _synthesizes(backend: object) -> TypeGuard[SynthesisBackend]:
    return hasattr(backend, "synthesize")
