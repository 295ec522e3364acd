"""POST /transcribe_batch, in the form of dwani.ai's workers: several files to transcribe in one request."""

from __future__ import annotations

import msgspec

from meltcore.common.errors import RequestError
from meltcore.serve.http.forms import MAX_BATCH, file_name_error, is_multipart, read_multipart
from meltcore.serve.http.http import finish_batch, while_connected
from meltcore.serve.http.operation import DWANI, Operation
from meltcore.serve.tasks.exchange import Endpoint, Exchange
from meltcore.serve.tasks.transcription.forms import transcriber
from meltcore.serve.tasks.transcription.transcription_form import speech_request

_FILES = ("files", "files[]")


class TranscribeBatchEndpoint(Endpoint):
    """Transcribes the files of a form together, and answers with their texts in order."""

    has_uploads = True
    paths = dwani_paths = ("/transcribe_batch/", "/transcribe_batch", "/v1/transcribe_batch/", "/v1/transcribe_batch")
    operations = (
        Operation(
            *("post", paths[1], f"Transcribe up to {MAX_BATCH} recordings", ("files",)), query=("language",), tag=DWANI
        ),
    )

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. Raises RequestError, ClientDisconnectedError."""
        body, content_type = await exchange.body(self.limit_bytes)
        if content_type is None or not is_multipart(content_type):
            raise RequestError("the body must be multipart/form-data with audio in the fields files", param="files")
        fields, files = exchange.query, list[bytes]()
        for name, value in await read_multipart(body, content_type, MAX_BATCH):
            if isinstance(value, str) and name in _FILES:
                raise file_name_error(name)
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
        work = finish_batch("files", (backend.transcribe(each) for each in requests))
        texts = [result.text for result in await while_connected(exchange.scope, work)]
        await exchange.answer(msgspec.json.encode({"transcriptions": texts}), b"application/json")
