"""Serves POST /v1/audio/speech, in OpenAI's form and in dwani.ai's form, and dwani.ai's batches of texts."""

from __future__ import annotations

import asyncio
import base64
import io
import zipfile
from collections.abc import Mapping

from meltcore.common.errors import RequestError
from meltcore.common.visible import is_visible
from meltcore.serve.http.forms import MAX_BATCH, is_multipart, split_form
from meltcore.serve.http.operation import AUDIO_TYPE, DWANI, Operation
from meltcore.serve.requests.asgi import finish_batch, while_connected
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.requests.protocol import convert_fields, decode_request
from meltcore.serve.requests.request_fields import shorten
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.synthesis.forms import (
    SpeechOptions,
    SpokenPart,
    SynthesisBackend,
    SynthesisFields,
    SynthesisRequest,
    speak_whole,
    synthesizer,
)

PATHS = ("/v1/audio/speech", "/audio/speech")
CONTENT_TYPES: dict[str, bytes] = {
    "mp3": b"audio/mpeg",
    "opus": b"audio/ogg",
    "aac": b"audio/aac",
    "flac": b"audio/flac",
    "wav": b"audio/wav",
    "pcm": b"audio/pcm",
}


class SpeechEndpoint(Endpoint):
    """Reads a request, and sends the speech of its text part by part."""

    has_uploads = is_by_language = True
    paths = dwani_paths = PATHS  # a query without a body is dwani.ai's form of the first
    operations = (Operation("post", PATHS[0], "Speak a text", SynthesisFields, AUDIO_TYPE, {"input": "go at seven"}),)

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        body = await exchange.body(self.limit_bytes)
        request = await read_request(body, exchange.body_type, exchange.query)
        exchange.fields |= {"model": request.model, "user": request.user}
        backend = synthesizer(self.choices, request.language, request.model)
        await while_connected(exchange.scope, send_speech(exchange, backend, request))


async def send_speech(exchange: Exchange, backend: SynthesisBackend, request: SynthesisRequest) -> None:
    """Send the speech of a text as it is spoken, as a file or as OpenAI's events.

    Raises RequestError if the model cannot speak the text.
    """
    content_type = CONTENT_TYPES[request.response_format]
    if request.is_whole:
        disposition = f'attachment; filename="speech.{request.response_format}"'
        exchange.headers += [(b"content-disposition", disposition.encode()), (b"cache-control", b"no-cache")]

    async def on_part(part: SpokenPart) -> None:
        if request.is_events:
            await exchange.event({"type": "speech.audio.delta", "audio": base64.b64encode(part.data).decode()})
        elif part.is_last and exchange.content_type is None:
            await exchange.answer(part.data, content_type)
        else:
            await exchange.stream(part.data, content_type)
            if part.is_last:
                await exchange.end()

    duration_s = await backend.synthesize(request, on_part)
    exchange.fields["audio_s"] = round(duration_s, 3)
    if request.is_events:
        await exchange.event({"type": "speech.audio.done"})
        await exchange.end()


async def read_request(body: bytes, content_type: str, query: Mapping[str, str]) -> SynthesisRequest:
    """Return the request for speech in a body: JSON, a form with a reference, or dwani.ai's query without a body.

    Raises RequestError (400) if the body or the query is invalid.
    """
    reference = None
    if is_multipart(content_type):
        texts, files = await split_form(body, content_type, ("reference", "ref_audio"))
        form_texts, reference = dict(texts), next(iter(files), None)
        if len(form_texts) < len(texts):
            names = [name for name, _ in texts]
            repeated_name = shorten(next(name for name in names if names.count(name) > 1))
            raise RequestError(f"{repeated_name} is given twice", param=repeated_name)
        request = convert_fields(form_texts, SynthesisFields)
    elif body:
        request = decode_request(body, SynthesisFields)
    else:
        request = convert_fields(dict(query), SynthesisFields)
    return _request_of(request, reference, is_query=not body)


def _request_of(fields: SynthesisFields, reference: bytes | None, *, is_query: bool) -> SynthesisRequest:
    for name in ("text", "ref_audio_name", "ref_text"):  # dwani.ai's names of other fields
        openai_name = {"text": "input", "ref_audio_name": "voice", "ref_text": "reference_text"}[name]
        if getattr(fields, name) is not None and getattr(fields, openai_name) is not None:
            raise RequestError(f"{name} and {openai_name} mean the same; give one", param=name)
    is_worker_form = fields.text is not None
    text = fields.text if fields.input is None else fields.input
    if text is None or not is_visible(text):
        raise RequestError("input is empty: it must hold the text to speak", param="input")
    if fields.instructions:
        raise RequestError("instructions is not supported; leave it out", param="instructions")
    voice = fields.ref_audio_name if fields.voice is None else fields.voice
    if isinstance(voice, dict):
        if not isinstance(voice.get("id"), str):
            raise RequestError("voice must be a name, or an object whose id is one", param="voice")
        voice = voice["id"]
    reference_text = fields.ref_text if fields.reference_text is None else fields.reference_text
    if reference is not None and voice is not None:
        raise RequestError("voice and reference exclude each other: the reference is the voice", param="voice")
    if reference is not None and not is_visible(reference_text or ""):
        raise RequestError("reference_text is missing: what is said in the reference", param="reference_text")
    return fields.request(text, voice)._replace(
        reference=reference,
        reference_text=reference_text or "",
        response_format=fields.response_format or ("wav" if is_worker_form else "mp3"),
        is_whole=is_query or is_worker_form,
        is_events=fields.stream_format == "sse",
        user=fields.user,
    )


class SpeechBatchRequest(SpeechOptions, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/audio/speech_batch.

    `voice` is one voice for all texts, or a list with a voice for each text.
    """

    input: list[str]
    voice: str | list[str] | None = None


class SpeechBatchEndpoint(Endpoint):
    """Speaks several texts concurrently, and answers with a zip archive of their files in order."""

    paths = dwani_paths = ("/v1/audio/speech_batch", "/audio/speech_batch")
    operations = (
        Operation(
            *("post", paths[0], f"Speak up to {MAX_BATCH} texts, as a zip archive"),
            *(SpeechBatchRequest, "application/zip", {"input": ["go at seven", "come at nine"]}),
            tag=DWANI,
        ),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        fields = await self.read(exchange, SpeechBatchRequest)
        requests = _speech_requests(fields)
        backend = synthesizer(self.choices, fields.language, fields.model)
        exchange.fields |= {"model": backend.names[0], "texts": len(requests)}
        work = finish_batch("input", (speak_whole(backend, each) for each in requests))
        files = await while_connected(exchange.scope, work)
        extension = requests[0].response_format
        file_by_name = {f"audio_{index:02}.{extension}": data for index, data in enumerate(files)}
        archive = await asyncio.to_thread(_zip, file_by_name)
        exchange.headers.append((b"content-disposition", b'attachment; filename="speech.zip"'))
        await exchange.answer(archive, b"application/zip")


def _speech_requests(fields: SpeechBatchRequest) -> list[SynthesisRequest]:
    texts, voices = fields.input, fields.voice
    if not 1 <= len(texts) <= MAX_BATCH:
        raise RequestError(f"input must have 1 to {MAX_BATCH} texts; got {len(texts)}", param="input")
    for index, text in enumerate(texts):
        if not is_visible(text):
            raise RequestError(f"input[{index}] is empty: it must hold the text to speak", param=f"input[{index}]")
    if isinstance(voices, list) and len(voices) != len(texts):
        raise RequestError(
            f"voice must be one name, or as many as texts: got {len(voices)} for {len(texts)} texts", param="voice"
        )
    voice_list = voices if isinstance(voices, list) else [voices] * len(texts)
    return [fields.request(text, voice)._replace(is_whole=True) for text, voice in zip(texts, voice_list, strict=True)]


def _zip(files: dict[str, bytes]) -> bytes:
    """Return a zip archive of files. It is not compressed, because audio would not become smaller."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as target:
        for name, data in files.items():
            target.writestr(name, data)
    return archive.getvalue()
