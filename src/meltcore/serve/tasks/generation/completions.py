"""Serves POST /v1/chat/completions and /v1/completions, from the body of a request to the last byte of the response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from meltcore.common.errors import RequestError
from meltcore.serve.http.operation import Operation
from meltcore.serve.requests.asgi import Headers
from meltcore.serve.requests.exchange import EVENTS, Exchange
from meltcore.serve.requests.protocol import ChatRequest, CompletionRequest, StreamOptions
from meltcore.serve.tasks.endpoint import Endpoint
from meltcore.serve.tasks.generation.generation_ticket import GenerationTicket
from meltcore.serve.tasks.generation.local_engine import LocalEngine
from meltcore.serve.tasks.generation.responses import ChatResponseWriter, CompletionResponseWriter, ResponseWriter

# Log-probabilities of one response. More are encoded on a thread: this many take about 10 ms, the longest that one
# request may delay the streams of others.
INLINE_LOGPROBS = 2048
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
_STREAM_HEADERS: Headers = [
    (b"content-type", EVENTS),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would gather events into blocks
]


MakeWriter = Callable[[GenerationTicket, str, StreamOptions], ResponseWriter]


class GenerationEndpoint(Endpoint):
    """Serves a route as a raw ASGI application. No object of Starlette is used per token."""

    form: type[ChatRequest | CompletionRequest]
    writer_type: type[ResponseWriter]
    streams_calls = True  # or a stream has each call as a whole

    async def read_request(self, exchange: Exchange) -> tuple[ChatRequest | CompletionRequest, MakeWriter]:
        """Return the request, and what makes the writer of its answer.

        Raises RequestError (400, 413), ClientDisconnectedError.
        """
        return await self.read(exchange, self.form), self.writer_type

    async def respond(self, exchange: Exchange) -> None:
        """Answer one request. If the client disconnects first, the engine stops working on the request.

        Raises RequestError for a request that was refused before it started, and ClientDisconnectedError.
        """
        request, make_writer = await self.read_request(exchange)
        exchange.fields["user"] = request.user
        backend: LocalEngine = self.find_model(exchange, request.model)
        if request.stream_options is not None and not request.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        options = request.stream_options or StreamOptions()
        if not MIN_PRIORITY <= (request.priority or 0) <= MAX_PRIORITY:
            raise RequestError(
                f"priority must be at least {MIN_PRIORITY} and at most {MAX_PRIORITY}; got {request.priority}",
                param="priority",
            )
        ticket = GenerationTicket(
            arrived_s=exchange.arrived_s,
            streaming=bool(request.stream),
            every_token=bool(options.continuous_usage_stats),
            streams_calls=self.streams_calls,
        )
        await backend.submit(request, ticket)
        writer = make_writer(ticket, request.model or backend.names[0], options)
        connection = exchange.scope["meltcore.connection"]
        ticket.disconnect = connection.transport.abort
        # No write would show the loss while there is nothing to write.
        connection.set_disconnect_callback(lambda: backend.release(ticket))
        try:
            if ticket.streaming:
                await _stream(exchange, ticket, writer)
            else:
                await _send_whole(exchange, ticket, writer)
        finally:
            connection.set_disconnect_callback(None)
            exchange.fields |= _log_fields(ticket)
            # Something is still open only when this task is being cancelled or has failed.
            backend.release(ticket)
            ticket.choices.clear()  # they refer to it: a cycle would keep the response until the next collection


class ChatEndpoint(GenerationEndpoint):
    """Serves POST /v1/chat/completions."""

    form, writer_type = ChatRequest, ChatResponseWriter
    operations = (
        Operation(
            *("post", "/v1/chat/completions", "Answer a chat, streamed or not", ChatRequest),
            example={
                "model": "NAME",
                "messages": [{"role": "user", "content": "What is 7 * 8?"}],
                "max_tokens": 64,
            },
        ),
    )


class CompletionsEndpoint(GenerationEndpoint):
    """Serves POST /v1/completions."""

    form, writer_type = CompletionRequest, CompletionResponseWriter
    operations = (
        Operation(
            *("post", "/v1/completions", "Continue texts or token ids", CompletionRequest),
            example={"model": "NAME", "prompt": "7 * 8 =", "max_tokens": 16},
        ),
    )


async def _stream(exchange: Exchange, ticket: GenerationTicket, writer: ResponseWriter) -> None:
    """Stream events until the end of the answer.

    The head is sent with the first event, so that an error before it is a plain HTTP error. The first event has the
    first token, except in an API that has events without output.
    """
    send = exchange.send
    wait_s, next_wait_s = writer.waits_s
    while True:
        has_changed = await ticket.wait_for_change(wait_s)
        wait_s = next_wait_s
        if ticket.error is not None:
            await _send_failure(exchange, ticket.error, writer)
            return
        if has_changed:
            events = [writer.event(choice) for choice in ticket.choices if choice.take_update()]
        else:
            events = writer.waiting_events(ticket)
        if not events:  # what came was sent with the event before
            continue
        if exchange.content_type is None:
            exchange.content_type = EVENTS
            headers = _STREAM_HEADERS + exchange.headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        last = not ticket.open_children
        if last:
            events += writer.end_events(ticket)
        body = events[0] if len(events) == 1 else b"".join(events)
        ticket.is_sending = True
        await send({"type": "http.response.body", "body": body, "more_body": not last})
        ticket.is_sending = False
        if last:
            if ticket.error is not None:
                exchange.fields["status"] = ticket.error.status
            return


async def _send_whole(exchange: Exchange, ticket: GenerationTicket, writer: ResponseWriter) -> None:
    while ticket.open_children and ticket.error is None:
        await ticket.wait_for_change()
    if ticket.error is not None:
        await _send_failure(exchange, ticket.error, writer)
        return
    if sum(choice.num_unsent_logprobs for choice in ticket.choices) <= INLINE_LOGPROBS:
        body = writer.body(ticket)
    else:
        body = await asyncio.to_thread(writer.body, ticket)
    ticket.is_sending = True
    await exchange.answer(body, b"application/json")
    ticket.is_sending = False


async def _send_failure(exchange: Exchange, error: RequestError, writer: ResponseWriter) -> None:
    exchange.fields["status"] = error.status
    if error.status == 499:
        exchange.scope["meltcore.connection"].transport.abort()
    elif exchange.content_type is None:
        await exchange.fail(error)
    else:
        event = writer.error_event(error, exchange.error_form)
        await exchange.send({"type": "http.response.body", "body": event, "more_body": False})


def _log_fields(ticket: GenerationTicket) -> dict[str, object]:
    """Return the outcome and the times of a request for its log line, but no text."""
    first = [choice.first_token_s for choice in ticket.choices if choice.first_token_s is not None]
    return {
        "stream": ticket.streaming,
        "finish_reason": ",".join(choice.finish_reason or "none" for choice in ticket.choices),
        "prompt_tokens": ticket.prompt_tokens,
        "cached_tokens": ticket.cached_tokens,
        "completion_tokens": ticket.output_tokens,
        "ttft_s": round(min(first) - ticket.arrived_s, 6) if first else None,
        "error": None if ticket.error is None else ticket.error.code or "engine_error",
    }
