"""A server whose every token has a known time: the reference for the load generator's metrics.

It implements the OpenAI completions and chat APIs without a model, and can misbehave on purpose. Run it alone with
`python tests/doubles/scripted_server.py --port 0 --ttft-ms 50 --itl-ms 5 --tokens 32`; it prints its address.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import sys
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

import msgspec
import uvloop

COMMAND = (sys.executable, __file__)  # of a server in a process of its own
COMMAND_LINE = shlex.join(COMMAND)
Fault = Literal[
    "none",  # serve as scripted
    "429",  # refuse with a rate-limit error
    "reset",  # drop the connection after the first token
    "no-finish",  # end the stream without finish_reason and [DONE]
    "no-done",  # end the stream without [DONE]
    "no-usage",  # leave the usage out
    "negative-usage",  # report -6 output tokens
    "inflated-usage",  # report a thousand times the output tokens
    "bad-json",  # one event is not JSON
    "bad-chunk",  # one chunk has no valid size
    "error-event",  # an error in place of the second token
    "empty",  # a complete answer without text
    "stall",  # nothing after the first token
    "silent",  # no answer at all
    "plain",  # an answer that is not a stream
    "close",  # a complete answer; then the connection is closed, which no header announces
    "drop",  # close the connection in place of the first token
    "no-template",  # refuse chats, as a model without a chat template does
]

_REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 429: "Too Many Requests", 500: "Internal Server Error"}


@dataclass(frozen=True, kw_only=True)
class Script:
    """Timing and faults of all answers. Token k (from 0) is sent `ttft_s + k * itl_s` after its request was read.

    `merge` tokens form one event, which is sent with the last of them. Every `fault_every`-th request has `fault`.
    """

    ttft_s: float = 0.05
    itl_s: float = 0.005
    tokens: int = 32
    merge: int = 1
    fault: Fault = "none"
    fault_every: int = 1
    die_after: int | None = None  # number of the request at whose first token the process exits
    model: str = "scripted"


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any]]


class _Request(msgspec.Struct):
    messages: list[_Message] | None = None
    prompt: str | list[int] | None = None
    stream: bool = False
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """A word counts as a token where the prompt is text."""
        if isinstance(self.prompt, list):
            return len(self.prompt)
        contents = [self.prompt] if self.prompt is not None else [message.content for message in self.messages or []]
        return sum(_words(content) for content in contents)


def _words(content: str | list[dict[str, Any]]) -> int:
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(len(text.split()) for text in texts)


_decode_request = msgspec.json.Decoder(_Request).decode


class ScriptedServer:
    """Answers by `script` (which may be replaced between requests) and counts what it has done."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests = 0
        self.in_flight = 0
        self.in_flight_peak = 0
        self.is_asleep = False
        self.has_sleep_mode = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"  # as vLLM's routes /sleep and /wake_up
        self._server: asyncio.Server | None = None
        self.connections: set[_ServerConnection] = set()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> int:
        """Start to listen and return the port."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _ServerConnection(self), host, port, backlog=16_384)
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        """Stop listening and drop every connection, as a killed process would."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.abort()

    def count_request(self) -> bool:
        """Count a request; returns whether it is one of those with a fault."""
        self.requests += 1
        self.in_flight += 1
        self.in_flight_peak = max(self.in_flight_peak, self.in_flight)
        return self.script.fault != "none" and self.requests % self.script.fault_every == 0

    def metrics(self) -> str:
        """Format the gauges of /metrics."""
        return (
            f"# TYPE meltcore:requests_in_flight gauge\nmeltcore:requests_in_flight {self.in_flight}.0\n"
            f"# TYPE meltcore:requests_in_flight_peak gauge\nmeltcore:requests_in_flight_peak {self.in_flight_peak}.0\n"
        )


class _ServerConnection(asyncio.Protocol):
    """Reads requests one after another; each completion is answered by an `_Answer`."""

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server
        self._buffer = b""
        self._answer: _Answer | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.server.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        del exc
        self.server.connections.discard(self)
        if self._answer is not None:
            self._answer.stop()

    def abort(self) -> None:
        self.transport.abort()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.decode("latin-1").split("\r\n")
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        length = int(fields.get("content-length", "0"))
        if len(body) < length:
            return
        self._buffer = body[length:]
        method, path, _ = lines[0].split(" ")
        self._serve(method, path, body[:length])

    def _serve(self, method: str, path: str, body: bytes) -> None:
        if method == "POST" and path in ("/sleep?level=1", "/wake_up") and self.server.has_sleep_mode:
            self.server.is_asleep = path != "/wake_up"
            self.reply(200, "")
        elif method == "POST" and self.server.is_asleep:
            self.reply_error(500, "the server sleeps")
        elif method == "POST" and path in ("/v1/chat/completions", "/v1/completions"):
            try:
                request = _decode_request(body)
            except msgspec.DecodeError as error:
                self.reply_error(400, str(error))
                return
            is_chat = path.endswith("chat/completions")
            if is_chat and self.server.script.fault == "no-template":
                self.reply_error(400, "this model has no chat template")
                return
            self._answer = _Answer(self, request, chat=is_chat)
        elif path == "/v1/models":
            models = [{"id": self.server.script.model, "object": "model", "owned_by": "meltcore"}]
            self.reply(200, json.dumps({"object": "list", "data": models}))
        elif path == "/health":
            self.reply(200, "")
        elif path == "/metrics":
            self.reply(200, self.server.metrics())
        else:
            self.reply_error(404, f"{method} {path}: no such route")

    def reply(self, status: int, body: str) -> None:
        content = body.encode()
        head = (
            f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
        )
        self.transport.write(head.encode() + b"\r\n\r\n" + content)

    def reply_error(self, status: int, message: str) -> None:
        self.reply(status, json.dumps({"error": {"message": message, "type": "invalid_request_error", "code": None}}))


class _Answer:
    """Sends one answer at the times of the script, which count from when its request was read."""

    def __init__(self, connection: _ServerConnection, request: _Request, *, chat: bool) -> None:
        self._connection = connection
        self._server = connection.server
        self._script = script = connection.server.script
        self._chat = chat
        self._prompt_tokens = request.prompt_tokens
        options = request.stream_options or _StreamOptions()
        self._continuous = options.continuous_usage_stats
        self._streamed = request.stream
        limits = [limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None]
        self._tokens = min([script.tokens, *limits])
        self._sent = 0  # tokens
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._started_s = self._loop.time()
        self._fault: Fault = script.fault if self._server.count_request() else "none"
        self._ordinal = self._server.requests
        self._open = True
        self._begin()

    def stop(self) -> None:
        """End the answer: it is complete, or the client has gone."""
        if self._open:
            self._open = False
            self._server.in_flight -= 1
        if self._timer is not None:
            self._timer.cancel()

    def _begin(self) -> None:
        if self._fault == "429":
            self.stop()
            self._connection.reply_error(429, "the queue is full; try again later")
            return
        if self._fault == "plain":
            self.stop()
            self._connection.reply(200, "{}")
            return
        if self._fault == "silent":
            return
        if self._fault == "drop":
            self._timer = self._loop.call_later(self._script.ttft_s, self._connection.transport.close)
            return
        if not self._streamed:
            due_s = self._started_s + self._script.ttft_s + (self._tokens - 1) * self._script.itl_s
            self._timer = self._loop.call_at(due_s, self._send_unstreamed)
            return
        head = (
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        role = self._event({"role": "assistant", "content": ""}, 0) if self._chat else b""
        self._connection.transport.write(head + role)
        self._schedule()

    def _send_unstreamed(self) -> None:
        text = "".join(f" w{number}" for number in range(self._tokens))
        choice_fields: dict[str, Any] = (
            {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        )
        body: dict[str, Any] = {"choices": [{"index": 0, **choice_fields, "finish_reason": "length"}]}
        if self._fault != "no-usage":
            body["usage"] = self._usage(self._tokens)
        self.stop()
        self._connection.reply(200, json.dumps(body))

    def _schedule(self) -> None:
        last_of_event = min(self._sent + self._script.merge, self._tokens) - 1
        due_s = self._started_s + self._script.ttft_s + last_of_event * self._script.itl_s
        self._timer = self._loop.call_at(due_s, self._emit)

    def _emit(self) -> None:
        if self._script.die_after is not None and self._ordinal >= self._script.die_after:
            os._exit(17)
        first, self._sent = self._sent, min(self._sent + self._script.merge, self._tokens)
        text = "" if self._fault == "empty" else "".join(f" w{number}" for number in range(first, self._sent))
        self._connection.transport.write(self._event({"content": text}, self._sent))
        if self._misbehave():
            return
        if self._sent < self._tokens:
            self._schedule()
        else:
            self._finish()

    def _misbehave(self) -> bool:
        """Apply a fault that happens after the first event; returns whether it ends the answer."""
        transport = self._connection.transport
        if self._fault == "reset":
            transport.abort()
        elif self._fault == "bad-json":
            transport.write(_chunk(b'data: {"choices": [\n\n'))
        elif self._fault == "bad-chunk":
            transport.write(b"xyz\r\ndata\r\n")
        elif self._fault == "error-event":
            transport.write(_chunk(b'data: {"error": {"message": "the engine is gone"}}\n\n') + _chunk(b""))
            self.stop()
        elif self._fault == "no-finish":
            transport.write(_chunk(b""))
            self.stop()
        elif self._fault != "stall":
            return False
        return True

    def _finish(self) -> None:
        parts = [self._event({}, self._sent, finish_reason="length")]
        if self._fault != "no-usage":
            usage = json.dumps({"choices": [], "usage": self._usage(self._sent)})
            parts.append(_chunk(f"data: {usage}\n\n".encode()))
        if self._fault != "no-done":
            parts.append(_chunk(b"data: [DONE]\n\n"))
        self.stop()  # first: the client may send its next request as soon as it has read the end
        self._connection.transport.write(b"".join([*parts, _chunk(b"")]))
        if self._fault == "close":
            self._connection.transport.close()

    def _event(self, delta: dict[str, str], tokens: int, finish_reason: str | None = None) -> bytes:
        choice = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
        event: dict[str, Any] = {
            "id": f"cmpl-{self._ordinal}",
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": 1_700_000_000,
            "model": self._script.model,
            "choices": [{"index": 0, **choice, "logprobs": None, "finish_reason": finish_reason}],
        }
        if self._continuous and self._fault != "no-usage":
            event["usage"] = self._usage(tokens)
        return _chunk(b"data: " + msgspec.json.encode(event) + b"\n\n")

    def _usage(self, tokens: int) -> dict[str, int]:
        if self._fault == "negative-usage":
            tokens = -6
        elif self._fault == "inflated-usage":
            tokens *= 1000
        prompt = self._prompt_tokens
        return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


async def _serve(script: Script, port: int) -> None:
    server = ScriptedServer(script)
    print(f"meltcore: scripted server listening on http://127.0.0.1:{await server.start(port=port)}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--ttft-ms", type=float, default=50.0)
    parser.add_argument("--itl-ms", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--merge", type=int, default=1, help="tokens per event")
    parser.add_argument("--fault", choices=get_args(Fault), default="none")
    parser.add_argument("--fault-every", type=int, default=1)
    parser.add_argument("--die-after", type=int, help="exit at the first token of the request of this number")
    args = parser.parse_args()
    script = Script(
        ttft_s=args.ttft_ms / 1000,
        itl_s=args.itl_ms / 1000,
        tokens=args.tokens,
        merge=args.merge,
        fault=args.fault,
        fault_every=args.fault_every,
        die_after=args.die_after,
    )
    try:
        uvloop.run(_serve(script, args.port))
    except KeyboardInterrupt:
        return


if __name__ == "__main__":
    main()
