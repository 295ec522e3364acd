"""Serves POST /v1/audio/transcriptions, and dwani.ai's /v1/transcribe and /transcribe_batch."""

from __future__ import annotations

import asyncio

from meltcore.serve.http.forms import MAX_BATCH, split_audio_form
from meltcore.serve.http.operation import DWANI, Operation
from meltcore.serve.requests.asgi import finish_batch, while_connected
from meltcore.serve.requests.exchange import Exchange
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.transcription.forms import SpeechBackend, SpeechRequest, transcriber
from meltcore.serve.tasks.transcription.transcription_form import read_form, render, speech_request
from meltcore.text.transcripts import SpokenWord, Transcription, join_words

# dwani.ai's clients write the path with a slash at its end, and its own servers one without /v1.
DWANI_PATHS = ("/v1/transcribe", "/v1/transcribe/", "/transcribe", "/transcribe/")

FIELDS = ("file", "model", "language", "response_format", "timestamp_granularities[]", "decoder", "stream", "user")


class TranscriptionsEndpoint(Endpoint):
    """Reads a form, transcribes its file, and answers in the format that the form requests."""

    has_uploads = is_by_language = True
    paths, dwani_paths = ("/v1/audio/transcriptions", *DWANI_PATHS), DWANI_PATHS
    operations = (
        Operation("post", paths[0], "Transcribe a recording", FIELDS),
        Operation("post", DWANI_PATHS[0], "Transcribe a recording", ("file",), query=("language",), tag=DWANI),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        body = await exchange.body(self.limit_bytes)
        is_dwani = exchange.scope["path"] in DWANI_PATHS
        request = await read_form(body, exchange.body_type, exchange.query if is_dwani else {})
        exchange.fields |= {"model": request.model, "user": request.user}
        backend, request = transcriber(self.choices, request)
        await while_connected(exchange.scope, self._answer(exchange, backend, request))

    async def _answer(self, exchange: Exchange, backend: SpeechBackend, request: SpeechRequest) -> None:
        if request.is_streamed:
            result = await _stream(exchange, backend, request)
        else:
            result = await backend.transcribe(request)
            await exchange.answer(*render(result, request))
        exchange.fields["audio_s"] = round(result.duration_s, 3)


async def _stream(exchange: Exchange, backend: SpeechBackend, request: SpeechRequest) -> Transcription:
    """Send OpenAI's events: the text of each clip when it is transcribed, and finally the whole text."""
    parts: asyncio.Queue[list[SpokenWord] | None] = asyncio.Queue()
    work = asyncio.create_task(backend.transcribe(request, parts.put_nowait))
    work.add_done_callback(lambda _: parts.put_nowait(None))
    try:
        separator = ""
        while (words := await parts.get()) is not None:
            if words:
                await exchange.event({"type": "transcript.text.delta", "delta": separator + join_words(words)})
                separator = " "
        result = await work
    finally:
        work.cancel()
    await exchange.event({"type": "transcript.text.done", "text": result.text})
    await exchange.end()
    return result


class TranscribeBatchEndpoint(Endpoint):
    """Transcribes the files of a form concurrently, and answers with their texts in order."""

    has_uploads = True
    paths = dwani_paths = ("/transcribe_batch/", "/transcribe_batch", "/v1/transcribe_batch/", "/v1/transcribe_batch")
    operations = (
        Operation(
            *("post", paths[1], f"Transcribe up to {MAX_BATCH} recordings", ("files",)), query=("language",), tag=DWANI
        ),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError if it fails, and ClientDisconnectedError if its client is gone."""
        body = await exchange.body(self.limit_bytes)
        texts, files = await split_audio_form(body, exchange.body_type, ("files", "files[]"), MAX_BATCH)
        backend, request = transcriber(self.choices, speech_request({**exchange.query, **dict(texts)}, b""))
        requests = [request._replace(data=data) for data in files]
        exchange.fields |= {"model": backend.names[0], "files": len(files)}
        work = finish_batch("files", (backend.transcribe(each) for each in requests))
        transcripts = [result.text for result in await while_connected(exchange.scope, work)]
        await exchange.answer_json({"transcriptions": transcripts})
