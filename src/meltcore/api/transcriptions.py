"""POST /v1/audio/transcriptions, from the upload to the transcript."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from meltcore.api.backend import ModelTable
from meltcore.api.http import (
    ClientDisconnectedError,
    Headers,
    check_api_key,
    header,
    read_body,
    request_id,
    send_bytes,
    send_error,
)
from meltcore.api.log import Log
from meltcore.api.speech import SpeechBackend, SpeechRequest, read_form, render
from meltcore.config import ServerConfig
from meltcore.errors import RequestError
from meltcore.text.transcripts import Transcription

# OpenAI's limit of an upload. A larger --max-body raises it.
MIN_UPLOAD_BYTES = 25 * 2**20


class TranscriptionsEndpoint:
    """The route, as a raw ASGI application: a client that disconnects ends its work."""

    def __init__(self, models: ModelTable, config: ServerConfig, log: Log) -> None:
        self._models = models
        self._config = config
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        arrived_s, identity = time.monotonic(), request_id(scope)
        headers: Headers = [(b"x-request-id", identity.encode())]
        request: SpeechRequest | None = None
        error_code, status, duration_s = None, 200, None
        try:
            check_api_key(scope, self._config.api_key)
            self._models.check_ready()
            request = await self._read(scope, receive)
            result = await self._transcribe(scope, request, identity)
            duration_s = round(result.duration_s, 3)
            body, content_type = render(result, request)
            await send_bytes(send, body, content_type, headers=headers)
        except RequestError as error:
            status, error_code = error.status, error.code or error.param
            await send_error(send, error, headers=headers)
        except ClientDisconnectedError:
            status = 499
        except Exception as error:  # a fault of ours: the client gets the form it knows, uvicorn reports the error
            status = 500
            failure = RequestError(f"the server failed: {type(error).__name__}", status=500)
            await send_error(send, failure, headers=headers)
            raise
        finally:
            self._log.write(
                "request",
                request_id=identity,
                path=scope["path"],
                model=None if request is None else request.model,
                status=status,
                user=None if request is None else request.user,
                error=error_code,
                audio_s=duration_s,
                total_s=round(time.monotonic() - arrived_s, 6),
            )

    async def _read(self, scope: Scope, receive: Receive) -> SpeechRequest:
        limit_bytes = max(MIN_UPLOAD_BYTES, self._config.max_body_bytes)
        body = await read_body(scope, receive, limit_bytes)
        content_type = header(scope, b"content-type")
        return await read_form(body, None if content_type is None else content_type.decode("latin-1"))

    async def _transcribe(self, scope: Scope, request: SpeechRequest, identity: str) -> Transcription:
        """Transcribe until the end or until the client disconnects, which raises ClientDisconnectedError."""
        backend = self._models.find(request.model)
        if not isinstance(backend, SpeechBackend):
            raise RequestError(
                f"the model {backend.names[0]} generates text; it does not transcribe speech", param="model"
            )
        work = asyncio.create_task(backend.transcribe(request, identity))
        connection = scope["meltcore.connection"]
        connection.set_disconnect_callback(work.cancel)
        try:
            return await work
        except asyncio.CancelledError:
            if work.cancelled() and not _is_cancelling():
                raise ClientDisconnectedError from None
            work.cancel()
            raise
        finally:
            connection.set_disconnect_callback(None)


def _is_cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
