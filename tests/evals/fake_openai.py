"""A small server that speaks OpenAI's forms and knows the arithmetic problems' answers, for tests of eval and demo.

Run as a program it takes the place of `meltcore`: `fake_openai.py [--fault F] [--answers FILE] serve MODEL --port 0`.
A token is a word.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

FAULTS = (
    "none",
    "wrong-answers",  # every answer is off by one
    "streams-wrong",  # only streamed answers are off by one: what a bug under load looks like
    "dies",  # the process ends during the streamed requests
    "crashes",  # ends at once with a line on stderr
    "silent",  # never prints its address
    "never-ready",  # /health stays 503
    "deaf",  # ignores SIGTERM
    "no-usage",  # answers carry no usage
    "thinks-aloud",  # answers begin with a thinking block
    "bare-errors",  # errors are plain text
    "no-listing",  # /v1/models does not exist
    "stuck",  # answers after a minute
    "strict",  # refuses fields that are not OpenAI's
    "slow",  # streams the answers it knows for a minute
)
_MODEL = "fake"


class BadRequest(Exception):
    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class FakeServer(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True

    def __init__(self, fault: str = "none", answers: dict[str, int] | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fault = fault
        self.streamed = 0
        self.posts = 0
        self.answers = answers or {}  # question: value
        self.end_token: str | None = None  # what goes on for ever where ignore_eos is asked for
        self.seen: set[str] | None = None  # prompts in a prefix cache

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, question: str, streamed: bool) -> str:
        if self.fault == "thinks-aloud":
            return f"<think>\n{question}?\n</think>\nThe answer is 0."
        if question not in self.answers:
            return f"You asked: {question} I do not know."
        wrong = self.fault == "wrong-answers" or (self.fault == "streams-wrong" and streamed)
        return f"The answer is {self.answers[question] + wrong}."

    def tokens(self, text: str) -> list[str]:
        """The pieces that make up `text`, each of them a token."""
        return re.findall(r"\s*\S+", text)

    def usage(self, question: str, used: int, reason: str) -> tuple[int, int]:
        """(prompt, completion) tokens reported of an answer of `used` tokens."""
        return len(question.split()), used


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            self._json(503 if self.server.fault == "never-ready" else 200, {})
        elif self.path == "/v1/models" and self.server.fault != "no-listing":
            entry = {"id": _MODEL, "object": "model", "created": 0, "owned_by": "test", "weights": "real"}
            self._json(200, {"object": "list", "data": [entry]})
        else:
            self._error(BadRequest(f"no path {self.path}", status=404))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            fields = _checked(body)
            self.server.posts += 1
            if self.server.fault == "stuck":
                time.sleep(60)
            if self.server.fault == "strict" and "continuous_usage_stats" in fields.get("stream_options", {}):
                raise BadRequest("unknown field continuous_usage_stats", "stream_options")
            if self.path == "/v1/chat/completions":
                self._chat(fields)
            else:
                text = self.server.answer(fields["prompt"], False)
                self._json(200, {"object": "text_completion", "choices": [{"index": 0, "text": text}]})
        except BadRequest as error:
            self._error(error)

    def _chat(self, fields: dict[str, Any]) -> None:
        question = fields["messages"][-1]["content"]
        streamed = bool(fields.get("stream"))
        words = self.server.tokens(self.server.answer(question, streamed))
        limit = fields.get("max_completion_tokens") or fields.get("max_tokens") or 1000
        reason = "length" if len(words) > limit else "stop"
        if fields.get("ignore_eos") and self.server.end_token:
            words, reason = (words + [self.server.end_token] * limit)[:limit], "length"
        hidden = self.server.end_token if fields.get("skip_special_tokens", True) else None
        text = "".join(word for word in words[:limit] if word != hidden)
        for stop in fields.get("stop", []):
            if stop in text:
                text, reason = text[: text.index(stop)], "stop"
        prompt, used = self.server.usage(question, min(len(words), limit), reason)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": used, "total_tokens": prompt + used}
        if self.server.seen is not None:
            usage["prompt_tokens_details"] = {"cached_tokens": prompt - 1 if question in self.server.seen else 0}
            self.server.seen.add(question)
        if streamed:
            self._stream(self.server.tokens(text), reason, usage, fields)
            return
        message = {"role": "assistant", "content": text}
        answer = _frame("chat.completion", [{"index": 0, "message": message, "finish_reason": reason}])
        self._json(200, answer if self.server.fault == "no-usage" else {**answer, "usage": usage})

    def _stream(self, words: list[str], reason: str, usage: dict[str, int], fields: dict[str, Any]) -> None:
        self.server.streamed += 1
        if self.server.fault == "dies" and self.server.streamed > 20:
            os._exit(3)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event(_delta({"role": "assistant", "content": ""}))
        for word in words:
            if self.server.fault == "slow" and fields["messages"][-1]["content"] in self.server.answers:
                time.sleep(15)
            self._event(_delta({"content": word}))
        self._event(_delta({}, reason))
        if fields.get("stream_options", {}).get("include_usage"):
            self._event({**_frame("chat.completion.chunk", []), "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _json(self, status: int, content: object) -> None:
        self._send(status, json.dumps(content).encode(), "application/json")

    def _error(self, error: BadRequest) -> None:
        if self.server.fault == "bare-errors":
            self._send(error.status, str(error).encode(), "text/plain")
            return
        form = {"message": str(error), "type": "invalid_request_error", "param": error.param, "code": None}
        self._json(error.status, {"error": form})

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _frame(kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"id": "fake-1", "object": kind, "created": 1, "model": _MODEL, "choices": choices}


def _delta(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return _frame("chat.completion.chunk", [{"index": 0, "delta": delta, "finish_reason": reason}])


def _checked(body: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> None:
        raise BadRequest(f"{constant} is no JSON")

    try:
        fields = json.loads(body, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise BadRequest("the body is no JSON") from error
    if fields["model"] != _MODEL:
        raise BadRequest("no such model", "model", 404)
    if "messages" in fields:
        if not fields["messages"]:
            raise BadRequest("messages is empty", "messages")
        if any(message["role"] not in ("system", "user", "assistant") for message in fields["messages"]):
            raise BadRequest("unknown role", "messages")
    limit = fields.get("max_tokens", 1)
    if not isinstance(limit, int) or limit < 1:
        raise BadRequest("max_tokens must be a whole number of at least 1", "max_tokens")
    return fields


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("words", nargs=2)
    parser.add_argument("--port")
    options = parser.parse_args()
    if options.fault == "crashes":
        sys.exit("cannot open the model")
    server = FakeServer(options.fault, json.loads(options.answers.read_text()) if options.answers else {})
    if options.fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    if options.fault != "silent":
        print(f"meltcore: listening on {server.address}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(1)


if __name__ == "__main__":
    main()
