"""Reads OpenAI's form of a transcription request, and writes the answer in OpenAI's formats."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import msgspec

from meltcore.common.errors import RequestError
from meltcore.common.options import read_number
from meltcore.serve.http.forms import split_audio_form
from meltcore.serve.requests.request_fields import shorten
from meltcore.serve.tasks.transcription.forms import ResponseFormat, SpeechRequest
from meltcore.text.transcripts import SpokenWord, Transcription, join_words

_DECODERS = ("rnnt", "ctc")
_GRANULARITIES = ("word", "segment")
# Fields that are accepted with these values only: what they ask for otherwise is not supported.
_NEUTRAL = {
    "prompt": ("",),
    "chunking_strategy": ("auto",),
}
_FIELDS = {"file", "model", "language", "response_format", "timestamp_granularities[]", "timestamp_granularities"}
_FIELDS |= {"decoder", "stream", "temperature", "user", *_NEUTRAL}
_SEEK_S = 0.01  # the unit of `seek`: Whisper's frames
_TRUTH = {"true": True, "1": True, "false": False, "0": False}
_CONTENT_TYPES: dict[str, bytes] = {
    "text": b"text/plain; charset=utf-8",
    "srt": b"application/x-subrip; charset=utf-8",
    "vtt": b"text/vtt; charset=utf-8",
}


async def read_form(body: bytes, content_type: str, query: Mapping[str, str]) -> SpeechRequest:
    """Return the transcription request in the body of a form. `query` has the fields of the URL.

    Raises RequestError (400) that names a field.
    """
    given, (data,) = await split_audio_form(body, content_type, ("file",))
    texts, granularities = dict[str, str](), set[str]()
    for name, value in given:
        if name not in _FIELDS:
            raise RequestError(f"unknown field {shorten(name)!r}", param=shorten(name))
        if name.startswith("timestamp_granularities"):
            granularities.add(_one_of(value, _GRANULARITIES, "timestamp_granularities"))
        elif name in texts:
            raise RequestError(f"{name} is given twice", param=name)
        else:
            texts[name] = value
    return speech_request({**query, **texts}, data, frozenset(granularities))


def speech_request(texts: Mapping[str, str], data: bytes, granularities: frozenset[str] = frozenset()) -> SpeechRequest:
    """Return the request to transcribe the file `data`, with the fields in `texts`.

    Raises RequestError (400) that names a field.
    """
    if unknown := texts.keys() - _FIELDS:
        raise RequestError(f"unknown field {shorten(min(unknown))!r}", param=shorten(min(unknown)))
    for name, accepted in _NEUTRAL.items():
        if name in texts and texts[name] not in accepted:
            raise RequestError(f"{name} is not supported; leave it out or set {accepted[0]!r}", param=name)
    _check_temperature(texts.get("temperature", "0"))
    format_name = _one_of(texts.get("response_format", "json"), get_args(ResponseFormat), "response_format")
    if granularities and format_name != "verbose_json":
        raise RequestError(
            "timestamp_granularities needs response_format verbose_json", param="timestamp_granularities"
        )
    is_streamed = _TRUTH[_one_of(texts.get("stream", "false").lower(), tuple(_TRUTH), "stream")]
    if is_streamed and format_name not in ("json", "text"):
        raise RequestError("stream needs response_format json or text", param="stream")
    return SpeechRequest(
        data=data,
        model=texts.get("model"),
        language=texts.get("language") or None,
        response_format=format_name,  # type: ignore[arg-type] # checked above
        granularities=granularities or frozenset({"segment"}),
        decoder=_one_of(texts.get("decoder", "rnnt"), _DECODERS, "decoder"),
        is_streamed=is_streamed,
        user=texts.get("user"),
    )


def _check_temperature(value: str) -> None:
    """Raise RequestError (400) for a temperature other than 0, because tokens are never sampled."""
    try:
        is_zero = read_number(value, float) == 0
    except ValueError:
        raise RequestError(f"temperature must be a number; got {shorten(value)!r}", param="temperature") from None
    if not is_zero:
        raise RequestError("temperature is not supported; leave it out or set '0'", param="temperature")


def _one_of(value: str, accepted: tuple[str, ...], param: str) -> str:
    if value not in accepted:
        raise RequestError(f"{param} must be one of {', '.join(accepted)}; got {shorten(value)!r}", param=param)
    return value


def render(result: Transcription, request: SpeechRequest) -> tuple[bytes, bytes]:
    """Return the body of an answer and its content type."""
    format_name = request.response_format
    if format_name == "json":
        return msgspec.json.encode({"text": result.text}), b"application/json"
    if format_name == "verbose_json":
        return msgspec.json.encode(_verbose(result, request.granularities)), b"application/json"
    content = f"{result.text}\n" if format_name == "text" else result.subtitles(format_name)
    return content.encode(), _CONTENT_TYPES[format_name]


def _verbose(result: Transcription, granularities: frozenset[str]) -> dict[str, Any]:
    """Return a transcript in OpenAI's format verbose_json."""
    answer: dict[str, Any] = {
        "task": "transcribe",
        "language": result.language,
        "duration": round(result.duration_s, 3),
        "text": result.text,
        "usage": {"type": "duration", "seconds": round(result.duration_s, 3)},
    }
    if "segment" in granularities:
        answer["segments"] = [_segment(index, words) for index, words in enumerate(result.segments())]
    if "word" in granularities:
        answer["words"] = [{"word": word.text, "start": word.start_s, "end": word.end_s} for word in result.words]
    return answer


def _segment(index: int, words: Sequence[SpokenWord]) -> dict[str, Any]:
    text = join_words(words)
    content, tokens = text.encode(), [token for word in words for token in word.token_ids]
    return {
        "id": index,
        "seek": round(words[0].start_s / _SEEK_S),
        "start": words[0].start_s,
        "end": words[-1].end_s,
        "text": text,
        "tokens": tokens,
        "temperature": 0.0,  # tokens are not sampled
        "avg_logprob": round(sum(word.logprob for word in words) / max(1, len(tokens)), 6),
        "compression_ratio": round(len(content) / len(zlib.compress(content)), 3),  # as in Whisper
        "no_speech_prob": round(math.exp(sum(word.no_token_logprob for word in words)), 6),
    }
