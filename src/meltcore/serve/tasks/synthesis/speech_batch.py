"""POST /v1/audio/speech_batch, in the form of dwani.ai's workers: several texts to speak in one request."""

from __future__ import annotations

import asyncio
import io
import zipfile
from typing import Annotated

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.http.forms import MAX_BATCH
from meltcore.serve.http.http import finish_batch, while_connected
from meltcore.serve.http.operation import DWANI, Operation
from meltcore.serve.requests.protocol import AudioFormat, decode_request
from meltcore.serve.tasks.exchange import Endpoint, Exchange
from meltcore.serve.tasks.synthesis.forms import SynthesisRequest, speak_whole, synthesizer
from meltcore.text.visible import is_visible


class SpeechBatchRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/audio/speech_batch. voice: one for all texts, or one for each."""

    input: list[str]
    voice: str | list[str] | None = None
    model: str | None = None
    language: str | None = None
    response_format: AudioFormat | None = None
    speed: float | None = None
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)] | None = None
    num_steps: int | None = None


class SpeechBatchEndpoint(Endpoint):
    """Speaks texts together, and answers with a zip archive of their files in order."""

    paths = dwani_paths = ("/v1/audio/speech_batch", "/audio/speech_batch")
    operations = (
        Operation(
            *("post", paths[0], f"Speak up to {MAX_BATCH} texts, as a zip archive"),
            *(SpeechBatchRequest, "application/zip", {"input": ["go at seven", "come at nine"]}),
            tag=DWANI,
        ),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        body, _ = await exchange.body(self.limit_bytes)
        fields = decode_request(body, SpeechBatchRequest)
        requests = _speech_requests(fields)
        backend = synthesizer(self.choices, fields.language, fields.model)
        exchange.fields |= {"model": backend.names[0], "texts": len(requests)}
        work = finish_batch("input", (speak_whole(backend, each) for each in requests))
        files = await while_connected(exchange.scope, work)
        extension = requests[0].response_format
        named = {f"audio_{index:02}.{extension}": data for index, data in enumerate(files)}
        archive = await asyncio.to_thread(_zip, named)
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
