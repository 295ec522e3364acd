"""POST /v1/chat/completions and /v1/completions, from the request's body to the last byte of the response."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from meltcore.common.errors import RequestError
from meltcore.serve.http.http import (
    ClientDisconnectedError,
    Headers,
    error_json,
    read_body,
    request_id,
    send_error,
    send_json,
)
from meltcore.serve.requests.backend import LanguageBackend, ModelTable, language_backend
from meltcore.serve.requests.generation import Generation
from meltcore.serve.requests.log import Log
from meltcore.serve.requests.protocol import ChatRequest, CompletionRequest, StreamOptions, decode_request
from meltcore.serve.tasks.generation.responses import DONE, ChatResponseWriter, CompletionResponseWriter, ResponseWriter
from meltcore.settings.config import ServerConfig

# Log-probabilities of one response. More are encoded on a thread: this many take about 10 ms, the longest that one
# request may delay the streams of others.
INLINE_LOGPROBS = 2048
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather events into blocks
]


class CompletionsEndpoint:
    """One of the two routes, as a raw ASGI application: Starlette's Request and Response stay out of the token path."""

    def __init__(
        self, models: ModelTable, config: ServerConfig, log: Log, form: type[ChatRequest] | type[CompletionRequest]
    ) -> None:
        self.models = models
        self.config = config
        self.log = log
        self.form = form
        self.writer_type: type[ResponseWriter] = ChatResponseWriter if form is ChatRequest else CompletionResponseWriter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        handler = _RequestHandler(self, scope, receive, send)
        try:
            await handler.submit()
        except RequestError as error:
            await send_error(send, error, headers=handler.headers)
            handler.log(status=error.status, error=error.code or error.param)
            return
        except ClientDisconnectedError:
            handler.log(status=499)
            return
        except Exception as error:  # a fault of ours: the client gets the form it knows, uvicorn reports the error
            failure = RequestError(f"the server failed: {type(error).__name__}", status=500)
            await send_error(send, failure, headers=handler.headers)
            raise
        await handler.respond()


class _RequestHandler:
    """One request and its response on one connection."""

    backend: LanguageBackend  # the last four: from `submit` on
    generation: Generation | None = None
    writer: ResponseWriter
    usage_event: bool

    def __init__(self, endpoint: CompletionsEndpoint, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrived_s = time.monotonic()
        self.endpoint = endpoint
        self.scope = scope
        self.receive = receive
        self.send = send
        self.request_id = request_id(scope)
        self.headers: Headers = [(b"x-request-id", self.request_id.encode())]
        self.model: str | None = None
        self.user: str | None = None

    async def submit(self) -> None:
        """Read and check the request, and submit it to its backend. After an error nothing was started."""
        endpoint = self.endpoint
        endpoint.models.check_ready()  # before the body: while loading or draining no upload is worth reading
        body = await read_body(self.scope, self.receive, endpoint.config.max_body_bytes)
        request = decode_request(body, endpoint.form)
        self.user = request.user
        name = request.model or endpoint.models.default(endpoint.config.routes, self.scope["path"])
        backend = self.backend = language_backend(endpoint.models.find(name))
        self.model = backend.names[0]
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        options = request.stream_options or StreamOptions()
        if not MIN_PRIORITY <= (request.priority or 0) <= MAX_PRIORITY:
            raise RequestError(
                f"priority must be at least {MIN_PRIORITY} and at most {MAX_PRIORITY}; got {request.priority}",
                param="priority",
            )
        generation = Generation(
            self.request_id,
            arrived_s=self.arrived_s,
            streaming=bool(request.stream),
            every_token=bool(options.continuous_usage_stats),
        )
        await backend.submit(request, generation)
        self.generation = generation
        self.writer = endpoint.writer_type(generation, request.model or self.model, options)
        self.usage_event = bool(options.include_usage)

    async def respond(self) -> None:
        """Send the response; end the request in the engine if the client leaves first."""
        generation, backend = self.generation, self.backend
        assert generation is not None
        connection = self.scope["meltcore.connection"]
        generation.disconnect = connection.transport.abort
        # No write would show the loss while there is nothing to write.
        connection.set_disconnect_callback(lambda: backend.release(generation))
        status = 200
        try:
            if generation.streaming:
                status = await self._stream(generation)
            else:
                status = await self._send_unstreamed(generation)
        finally:
            connection.set_disconnect_callback(None)
            # Something is still open only when this task is being cancelled or has failed.
            backend.release(generation)
        self.log(status=status)
        generation.choices.clear()  # they refer to it: a cycle would keep the response until the next collection

    async def _stream(self, generation: Generation) -> int:
        """Stream events until the end.

        The head waits for the first token: a failure before it is a plain HTTP error.
        """
        started = False
        send, writer = self.send, self.writer
        while True:
            await generation.wait_for_change()
            if generation.error is not None:
                return await self._send_failure(generation.error, started)
            events = [writer.event(choice) for choice in generation.choices if choice.take_update()]
            if not events:  # what came was sent with the event before
                continue
            if not started:
                head = _STREAM_HEADERS + self.headers
                await send({"type": "http.response.start", "status": 200, "headers": head})
                started = True
            last = not generation.open_children
            if last:
                if self.usage_event:
                    events.append(writer.usage_event(generation))
                events.append(DONE)
            body = events[0] if len(events) == 1 else b"".join(events)
            generation.is_sending = True
            await send({"type": "http.response.body", "body": body, "more_body": not last})
            generation.is_sending = False
            if last:
                return generation.error.status if generation.error is not None else 200

    async def _send_failure(self, error: RequestError, started: bool) -> int:
        if error.status == 499:
            self.scope["meltcore.connection"].transport.abort()
        elif started:
            event = b"event: error\ndata: " + error_json(error) + b"\n\n"
            await self.send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await send_error(self.send, error, headers=self.headers)
        return error.status

    async def _send_unstreamed(self, generation: Generation) -> int:
        while generation.open_children and generation.error is None:
            await generation.wait_for_change()
        if generation.error is not None:
            return await self._send_failure(generation.error, started=False)
        if sum(choice.unsent_logprobs for choice in generation.choices) <= INLINE_LOGPROBS:
            body = self.writer.body(generation)
        else:
            body = await asyncio.to_thread(self.writer.body, generation)
        generation.is_sending = True
        await send_json(self.send, body, headers=self.headers)
        generation.is_sending = False
        return 200

    def log(self, *, status: int, error: str | None = None) -> None:
        """Write the request's line: identity, outcome and times, never text."""
        generation, now_s = self.generation, time.monotonic()
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "path": self.scope["path"],
            "model": self.model,
            "status": status,
            "user": self.user,
            "error": error,
        }
        if generation is not None:
            first = [choice.first_token_s for choice in generation.choices if choice.first_token_s is not None]
            fields |= {
                "stream": generation.streaming,
                "finish_reason": ",".join(choice.finish_reason or "none" for choice in generation.choices),
                "prompt_tokens": generation.prompt_tokens,
                "cached_tokens": generation.cached_tokens,
                "completion_tokens": generation.output_tokens,
                "ttft_s": round(min(first) - self.arrived_s, 6) if first else None,
                "error": None if generation.error is None else generation.error.code or "engine_error",
            }
        self.endpoint.log.write("request", **fields, total_s=round(now_s - self.arrived_s, 6))
