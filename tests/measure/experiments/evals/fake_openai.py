"""Fake servers with OpenAI's API, for tests of eval, demo and tune. A token is a word, or a token of a real tokenizer.

Run as a program it takes the place of `meltcore`: `fake_openai.py [--fault F] [--answers FILE] serve MODEL --port 0`.
With `--items FILE --right N --port P` it is the server of a baseline.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

import meltcore
from meltcore.measure.experiments.evals.gsm8k_data import Item, read_items

FAULTS = (
    "none",
    "wrong-answers",  # every answer is off by one
    "streams-wrong",  # only streamed answers are off by one: what a bug under load looks like
    "dies",  # the process ends during the streamed requests
    "crashes",  # ends immediately with a line on stderr
    "silent",  # never prints its address
    "never-ready",  # /health stays 503
    "failed-model",  # a model of the fleet has failed
    "deaf",  # ignores SIGTERM
    "no-usage",  # answers carry no usage
    "thinks-aloud",  # answers begin with a thinking block
    "reasons",  # answers have reasoning beside their content
    "bare-errors",  # errors are plain text
    "no-listing",  # /v1/models does not exist
    "stuck",  # answers after a minute
    "strict",  # refuses fields that are not OpenAI's
    "slow",  # streams the answers it knows for a minute
)
_MODEL = "fake"


class BadRequestError(Exception):
    def __init__(self, message: str, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param, self.status = param, status


class FakeServer(ThreadingHTTPServer):
    request_queue_size = 512
    daemon_threads = True

    def __init__(self, fault: str = "none", answers: dict[str, int] | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.fault = fault
        self.device = "CPU"
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
    disable_nagle_algorithm = True  # else each small write waits up to 40 ms for the client's acknowledgement
    server: FakeServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/health":
            failed = (
                {"status": "degraded", "models": {_MODEL: "no memory"}} if self.server.fault == "failed-model" else {}
            )
            self._json(503 if self.server.fault == "never-ready" else 200, failed)
        elif self.path == "/v1/status":
            status = "failed" if self.server.fault == "failed-model" else "ready"
            self._json(200, {"models": [{"name": _MODEL, "status": status}]})
        elif self.path == "/v1/models" and self.server.fault != "no-listing":
            entry = {
                "id": _MODEL,
                "object": "model",
                "created": 0,
                "owned_by": "test",
                "weights": "real",
                "device": self.server.device,
            }
            self._json(200, {"object": "list", "data": [entry]})
        else:
            self._error(BadRequestError(f"no path {self.path}", status=404))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        try:
            fields = _checked(body)
            self.server.posts += 1
            if self.server.fault == "stuck":
                time.sleep(60)
            if self.server.fault == "strict" and "continuous_usage_stats" in fields.get("stream_options", {}):
                raise BadRequestError("unknown field continuous_usage_stats", "stream_options")
            if self.path == "/v1/chat/completions":
                self._chat(fields)
            else:
                text = self.server.answer(fields["prompt"], False)
                self._json(200, {"object": "text_completion", "choices": [{"index": 0, "text": text}]})
        except BadRequestError as error:
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
        if self.server.fault == "reasons":
            message["reasoning_content"] = "12 and 7 make 19."
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

    def _error(self, error: BadRequestError) -> None:
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
        raise BadRequestError(f"{constant} is no JSON")

    try:
        fields = json.loads(body, parse_constant=refuse)
    except json.JSONDecodeError as error:
        raise BadRequestError("the body is no JSON") from error
    if fields["model"] != _MODEL:
        raise BadRequestError("no such model", "model", 404)
    if "messages" in fields:
        if not fields["messages"]:
            raise BadRequestError("messages is empty", "messages")
        if any(message["role"] not in ("system", "user", "assistant") for message in fields["messages"]):
            raise BadRequestError("unknown role", "messages")
    limit = fields.get("max_tokens", 1)
    if not isinstance(limit, int) or limit < 1:
        raise BadRequestError("max_tokens must be a whole number of at least 1", "max_tokens")
    return fields


Lie = Literal[
    "none",
    "wrong-sums",
    "one-wrong-sum",
    "prompt-cut",
    "prompt-stretched",
    "output-halved",
    "echo",
    "mute",
    "once-mute",
    "strict",
    "stops",
    "remembers",
]
TEMPLATE_TOKENS = 12
CHATTER = " it is a sum of many parts" * 4


class CountingServer(FakeServer):
    """Answers "What is a + b?" correctly and anything else with `CHATTER`."""

    def __init__(self, tokenizer: str, lie: Lie = "none", port: int = 0) -> None:
        super().__init__("strict" if lie == "strict" else "none", port=port)
        self._tokenizer = Tokenizer.from_file(f"{tokenizer}/tokenizer.json")
        self._lie = lie
        if lie != "stops":
            self.end_token = "<|im_end|>"
        if lie == "remembers":
            self.seen = set()
        self.asked: list[str] = []
        self.sums = 0
        self.chats = 0
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, question: str, streamed: bool) -> str:
        self.asked.append(question)
        found = re.fullmatch(r"What is (\d+) ([+-]) (\d+)\?", question)
        if found is None:
            self.chats += 1
            return "" if self._lie == "mute" or (self._lie == "once-mute" and self.chats % 8 == 5) else CHATTER
        self.sums += 1
        a, b = int(found[1]), int(found[3])
        value = a + b if found[2] == "+" else a - b
        if self._lie == "wrong-sums" or (self._lie == "one-wrong-sum" and self.sums == 1):
            value += 1000
        return f"You ask {a} and {b}." if self._lie == "echo" else f"{a} {found[2]} {b} = {value}."

    def tokens(self, text: str) -> list[str]:
        ends = [end for _, end in self._tokenizer.encode(text, add_special_tokens=False).offsets]
        return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    def usage(self, question: str, used: int, reason: str) -> tuple[int, int]:
        """An answer that stops by itself has an end token, which has no text."""
        prompt = len(self._tokenizer.encode(question, add_special_tokens=False).ids)
        if self._lie == "prompt-cut":
            prompt //= 2
        elif self._lie == "prompt-stretched":  # by more than a template would
            prompt += prompt // 20 + 46
        else:
            prompt += TEMPLATE_TOKENS
        return prompt, used // 2 if self._lie == "output-halved" else used + (reason == "stop")

    def close(self) -> None:
        self.shutdown()
        self.server_close()


TOKENIZER = str(Path(meltcore.__file__).parent / "bundled" / "sums")
ITEMS = [Item(f"Problem {at}: how many?", f"Some work.\n#### {at * 37 + 5}") for at in range(200)]


def write_items(path: Path) -> Path:
    path.write_text("".join(json.dumps({"question": item.question, "answer": item.answer}) + "\n" for item in ITEMS))
    return path


class EvaluationServer(CountingServer):
    """Answers the first `right` of `items` correctly, the others one too high; all else as a CountingServer."""

    def __init__(self, items: list[Item], right: int, port: int = 0) -> None:
        self._values = {item.question: int(item.reference) + (at >= right) for at, item in enumerate(items)}
        super().__init__(TOKENIZER, port=port)

    def answer(self, question: str, streamed: bool) -> str:
        found = re.fullmatch(r"Q: (.*)\nA:", question, re.DOTALL)
        if found is None:
            return super().answer(question, streamed)
        return f"The answer is {self._values[found[1]]}."


# How models end an answer; each takes the number as text with and without thousands commas.
FORMS: dict[str, Callable[[int], str]] = {
    "sentence": lambda value: f"First 2 + 3 = 5. The answer is {value}.",
    "sentence-commas": lambda value: f"First 2 + 3 = 5. The answer is {value:,}.",
    "sentence-dollars": lambda value: f"First 2 + 3 = 5 dollars. The answer is ${value:,}.",
    "hashes": lambda value: f"2 + 3 = 5\n#### {value:,}",
    "bold": lambda value: f"First 2 + 3 = 5.\n\n**{value}**",
    "boxed": lambda value: f"First 2 + 3 = 5. So \\boxed{{{value}}}",
    "unit": lambda value: f"They pay ${value:,} together",
    "number": lambda value: str(value),
}
# Those that also have the words and characters which strict extraction asks for.
STRICT_FORMS = ("sentence", "sentence-commas")


class AnsweringServer(FakeServer):
    """Answers the first `right` of `items` correctly in `form` and the others one too high."""

    def __init__(self, items: list[Item], right: int, form: str) -> None:
        super().__init__()
        self._form = FORMS[form]
        self._values = {
            item.question: int(item.reference.replace(",", "")) + (at >= right) for at, item in enumerate(items)
        }
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, question: str, streamed: bool) -> str:
        self.asked.append(question)
        found = re.fullmatch(r"(?:Q: )?(.*?)(?:\nA:)?", question, re.DOTALL)
        assert found is not None
        return self._form(self._values[found[1]])

    def close(self) -> None:
        self.shutdown()
        self.server_close()


def serve_as_meltcore() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", choices=FAULTS, default="none")
    parser.add_argument("--answers", type=Path)
    parser.add_argument("--device", default="CPU")
    parser.add_argument("words", nargs=2)
    parser.add_argument("--port")
    options = parser.parse_args()
    if options.fault == "crashes":
        sys.exit("cannot open the model")
    server = FakeServer(options.fault, json.loads(options.answers.read_text()) if options.answers else {})
    server.device = options.device
    if options.fault == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))
    if options.fault != "silent":
        print(f"meltcore: listening on {server.address}", flush=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    while True:
        time.sleep(1)


def serve_as_peer() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", required=True)
    parser.add_argument("--right", type=int, default=200)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--child", help="write the id of a child of ours, which outlives us, into this file")
    parser.add_argument("--never", action="store_true", help="do not become ready")
    options = parser.parse_args()
    if options.child:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(options.child).write_text(str(child.pid))
    if not options.never:
        EvaluationServer(read_items(options.items, 200), options.right, options.port)
    while True:
        time.sleep(1)


if __name__ == "__main__":
    serve_as_peer() if "--items" in sys.argv else serve_as_meltcore()
