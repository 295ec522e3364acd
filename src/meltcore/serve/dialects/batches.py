"""The batches of dwani.ai's workers: several files to transcribe, or texts to speak, in one request."""

from __future__ import annotations

import asyncio
import io
import zipfile

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.http.forms import is_multipart, no_file_name, read_multipart
from meltcore.serve.http.http import finish_all, while_connected
from meltcore.serve.requests.protocol import SpeechBatchRequest, decode_request
from meltcore.serve.tasks.exchange import Endpoint, Exchange
from meltcore.serve.tasks.synthesis.forms import SpokenPart, SynthesisBackend, SynthesisRequest, synthesizer
from meltcore.serve.tasks.transcription.forms import SpeechBackend, SpeechRequest, transcriber
from meltcore.serve.tasks.transcription.transcription_form import speech_request
from meltcore.text.visible import is_visible

TRANSCRIBE_BATCH_PATHS = ("/transcribe_batch/", "/transcribe_batch", "/v1/transcribe_batch/", "/v1/transcribe_batch")
SPEECH_BATCH_PATHS = ("/v1/audio/speech_batch", "/audio/speech_batch")
MAX_BATCH = 64  # files or texts
_FILES = ("files", "files[]")


class TranscribeBatchEndpoint(Endpoint):
    """Transcribes the files of a form together, and answers with their texts in order."""

    paths = dwani_paths = TRANSCRIBE_BATCH_PATHS

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        body, content_type = await exchange.body(self.upload_limit_bytes)
        if content_type is None or not is_multipart(content_type):
            raise RequestError("the body must be multipart/form-data with audio in the fields files", param="files")
        fields, files = exchange.query, list[bytes]()
        for name, value in await read_multipart(body, content_type, MAX_BATCH):
            if isinstance(value, str) and name in _FILES:
                raise no_file_name(name)
            if isinstance(value, str):
                fields[name] = value
            elif name in _FILES:
                files.append(value)
            else:
                raise RequestError(f"unknown file {name[:60]!r}; audio goes into the fields files", param=name[:60])
        if not files:
            raise RequestError("files is missing: it must hold the audio, with file names", param="files")
        backend, request = transcriber(self.choices, speech_request(fields, b""))
        requests = [request._replace(data=data) for data in files]
        exchange.fields |= {"model": backend.names[0], "files": len(files)}
        work = finish_all(_transcribe(backend, each, f"files[{index}]") for index, each in enumerate(requests))
        texts = await while_connected(exchange.scope, work)
        await exchange.answer(msgspec.json.encode({"transcriptions": texts}), b"application/json")


class SpeechBatchEndpoint(Endpoint):
    """Speaks texts together, and answers with a zip archive of their files in order."""

    paths = dwani_paths = SPEECH_BATCH_PATHS

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        body, _ = await exchange.body(self._config.max_body_bytes)
        fields = decode_request(body, SpeechBatchRequest)
        requests = _speech_requests(fields)
        backend = synthesizer(self.choices, fields.language, fields.model)
        exchange.fields |= {"model": backend.names[0], "texts": len(requests)}
        work = finish_all(_speak(backend, each, f"input[{index}]") for index, each in enumerate(requests))
        files = await while_connected(exchange.scope, work)
        extension = requests[0].response_format
        named = {f"audio_{index:02}.{extension}": data for index, data in enumerate(files)}
        archive = await asyncio.to_thread(_zip, named)
        exchange.headers.append((b"content-disposition", b'attachment; filename="speech.zip"'))
        await exchange.answer(archive, b"application/zip")


async def _transcribe(backend: SpeechBackend, request: SpeechRequest, name: str) -> str:
    try:
        return (await backend.transcribe(request)).text
    except RequestError as error:
        raise _named(error, name) from error


async def _speak(backend: SynthesisBackend, request: SynthesisRequest, name: str) -> bytes:
    parts: list[bytes] = []

    async def on_part(part: SpokenPart) -> None:
        parts.append(part.data)

    try:
        await backend.synthesize(request, on_part)
    except RequestError as error:
        raise _named(error, name) from error
    return b"".join(parts)


def _named(error: RequestError, name: str) -> RequestError:
    """Return the error of one of several with its place."""
    return RequestError(f"{name}: {error.message}", param=name, status=error.status, code=error.code)


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
    return [
        SynthesisRequest(
            text=text,
            voice=voices[index] if isinstance(voices, list) else voices,
            response_format=fields.response_format or "mp3",
            speed=1.0 if fields.speed is None else fields.speed,
            seed=fields.seed or 0,
            num_steps=fields.num_steps,
            is_whole=True,
            language=fields.language,
            model=fields.model,
        )
        for index, text in enumerate(texts)
    ]


def _zip(files: dict[str, bytes]) -> bytes:
    """Return an archive without compression, which audio does not gain from."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as target:
        for name, data in files.items():
            target.writestr(name, data)
    return archive.getvalue()
