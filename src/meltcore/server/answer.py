"""POST /v1/chat/completions and /v1/completions: from the body to the last byte of the answer."""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from meltcore.errors import RequestError
from meltcore.server.front import Front
from meltcore.server.generation import Generation
from meltcore.server.http import (
    ClientDisconnectedError,
    Headers,
    check_api_key,
    error_json,
    read_body,
    request_id,
    send_error,
    send_json,
)
from meltcore.server.open_requests import client_gone
from meltcore.server.protocol import ChatRequest, CompletionRequest, decode_request
from meltcore.server.replies import DONE, ChatReply, CompletionReply, Reply

# Of one whole answer. More are written on a thread: this many take about 10 ms, the most that one request may hold up
# every other stream.
INLINE_LOGPROBS = 2048
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
_STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather events into blocks
]


class AnswerEndpoint:
    """One of the two routes, as a raw ASGI application: Starlette's Request and Response stay out of the token path."""

    def __init__(self, front: Front, form: type[ChatRequest] | type[CompletionRequest]) -> None:
        self._front = front
        self._form = form
        self._reply_form: type[Reply] = ChatReply if form is ChatRequest else CompletionReply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = _Exchange(self._front, scope, receive, send)
        try:
            generation, reply, usage_event = await self._admit(exchange)
        except RequestError as error:
            await send_error(send, error, headers=exchange.headers)
            exchange.log(status=error.status, error=error.code or error.param)
            return
        except ClientDisconnectedError:
            exchange.log(status=499)
            return
        except Exception as error:  # a fault of ours: the client gets the form it knows, uvicorn reports the error
            failure = RequestError(f"the server failed: {type(error).__name__}", status=500)
            await send_error(send, failure, headers=exchange.headers)
            raise
        await exchange.answer(generation, reply, usage_event=usage_event)

    async def _admit(self, exchange: _Exchange) -> tuple[Generation, Reply, bool]:
        """Check everything, then hand the request to the engine. Nothing has to be undone where this raises."""
        front = self._front
        check_api_key(exchange.scope, front.config.api_key)
        front.ready_model(None)  # before the body: while loading or draining nobody's upload is worth reading
        body = await read_body(exchange.scope, exchange.receive, front.config.max_body_bytes)
        request = decode_request(body, self._form)
        exchange.user = request.user
        model = front.ready_model(request.model)
        streaming, options = bool(request.stream), request.stream_options
        if options is not None and not streaming:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        continuous = options is not None and bool(options.continuous_usage_stats)
        priority = request.priority or 0
        if not MIN_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(
                f"priority must be at least {MIN_PRIORITY} and at most {MAX_PRIORITY}; got {priority}", param="priority"
            )
        prompts = await front.prompts(model, request)
        params = front.sampling(model, request, prompts)
        generation = Generation(
            exchange.request_id, arrived_s=exchange.arrived_s, streaming=streaming, every_token=continuous
        )
        marks = model.text.thought_marks if isinstance(request, ChatRequest) else None
        for prompt, settings in zip(prompts, params, strict=True):
            generation.add_choice(prompt, settings, model.text.tokenizer, marks)
        front.admit(generation, priority)
        reply = self._reply_form(generation, request.model, model.text.tokenizer, usage_in_events=continuous)
        return generation, reply, options is not None and bool(options.include_usage)


class _Exchange:
    """One request and its answer on one connection."""

    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send) -> None:
        self.arrived_s = time.monotonic()
        self.front = front
        self.scope = scope
        self.receive = receive
        self.send = send
        self.request_id = request_id(scope)
        self.headers: Headers = [(b"x-request-id", self.request_id.encode())]
        self.user: str | None = None

    async def answer(self, generation: Generation, reply: Reply, *, usage_event: bool) -> None:
        """Send the answer as it comes, or whole; end the request in the engine should the client leave first."""
        connection = self.scope["meltcore.connection"]
        generation.cut_off = connection.transport.abort
        # Which no write would tell while there is nothing to write.
        connection.when_lost(lambda: self.front.requests.end(generation, client_gone(), "aborted"))
        status = 200
        try:
            if generation.streaming:
                status = await self._stream(generation, reply, usage_event)
            else:
                status = await self._whole(generation, reply)
        finally:
            connection.when_lost(None)
            self.front.time_limit.forget(generation)
            # Nothing is open here unless this task is being cancelled or has failed: then the engine must be told.
            self.front.requests.end(generation, client_gone(), "aborted")
        self.log(status=status, generation=generation)
        generation.choices.clear()  # they point back at it: a cycle would keep the answer until the next collection

    async def _stream(self, generation: Generation, reply: Reply, usage_event: bool) -> int:
        """Events until the end. The head waits for the first token: a failure before it is a plain HTTP error."""
        started = False
        send = self.send
        while True:
            await generation.news()
            if generation.error is not None:
                return await self._stream_error(generation.error, started)
            events = [reply.event(choice) for choice in generation.choices if choice.take_news()]
            if not events:  # what came was sent with the event before
                continue
            if not started:
                head = _STREAM_HEADERS + self.headers
                await send({"type": "http.response.start", "status": 200, "headers": head})
                started = True
            last = not generation.open_choices
            if last:
                if usage_event:
                    events.append(reply.usage_event(generation))
                events.append(DONE)
            body = events[0] if len(events) == 1 else b"".join(events)
            generation.sending = True
            await send({"type": "http.response.body", "body": body, "more_body": not last})
            generation.sending = False
            if last:
                return generation.error.status if generation.error is not None else 200

    async def _stream_error(self, error: RequestError, started: bool) -> int:
        if error.status == 499:
            self.scope["meltcore.connection"].transport.abort()
        elif started:
            event = b"event: error\ndata: " + error_json(error) + b"\n\n"
            await self.send({"type": "http.response.body", "body": event, "more_body": False})
        else:
            await send_error(self.send, error, headers=self.headers)
        return error.status

    async def _whole(self, generation: Generation, reply: Reply) -> int:
        while generation.open_choices and generation.error is None:
            await generation.news()
        if generation.error is not None:
            return await self._stream_error(generation.error, started=False)
        if sum(choice.unsent_logprobs for choice in generation.choices) <= INLINE_LOGPROBS:
            body = reply.body(generation)
        else:
            body = await asyncio.to_thread(reply.body, generation)
        generation.sending = True
        await send_json(self.send, body, headers=self.headers)
        generation.sending = False
        return 200

    def log(self, *, status: int, generation: Generation | None = None, error: str | None = None) -> None:
        """The one line of this request: who, what, how long; never text."""
        front, now_s = self.front, time.monotonic()
        fields: dict[str, object] = {
            "request_id": self.request_id,
            "path": self.scope["path"],
            "model": front.names[0],
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
        front.log.write("request", **fields, total_s=round(now_s - self.arrived_s, 6))
