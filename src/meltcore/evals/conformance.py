"""Does a server speak OpenAI's forms? A list of small checks, each PASS or FAIL with what was seen.

Forms: https://platform.openai.com/docs/api-reference. A check that cannot run fails; there is no third state. One that
is not asked, because the server has stopped answering, fails too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meltcore.errors import MeltcoreError
from meltcore.evals.api import Api, ApiTimeoutError, Reply
from meltcore.results.schema import CheckResult

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_QUESTION = "What is 12 + 7?"
_LONG_QUESTION = "Count from 1 to 20."  # where the answer must be long enough to be cut: a sum may be one token
_MAX_TOKENS = 48
# Timeouts in a row after which a check is not asked any more: one that needs an answer of the model, and one that a
# server can refuse without it, which gets a try of its own. All of them would take half an hour.
ANSWER, REFUSAL = 2, 3


class Mismatch(MeltcoreError):
    """The server's answer is not of the promised form."""


@dataclass(frozen=True)
class Check:
    """`run` returns a few words on what was seen, or raises."""

    name: str
    run: Callable[[Server], str]
    give_up: float  # after so many timeouts in a row it is not asked


CHECKS: list[Check] = []


def check(name: str, give_up: float = math.inf) -> Callable[[Callable[[Server], str]], Callable[[Server], str]]:
    """Register a function as the check called `name`."""

    def register(function: Callable[[Server], str]) -> Callable[[Server], str]:
        CHECKS.append(Check(name, function, give_up))
        return function

    return register


@dataclass(frozen=True)
class Server:
    """The server under test, with one plain chat answer that several checks look at."""

    api: Api
    model: str

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": _QUESTION}]
        return {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": _MAX_TOKENS, **fields}

    def chat(self, **fields: Any) -> dict[str, Any]:
        return _ok(self.api.post(CHAT, self.chat_body(**fields)))

    def long_body(self, **fields: Any) -> dict[str, Any]:
        return self.chat_body(messages=[{"role": "user", "content": _LONG_QUESTION}], **fields)

    def long_chat(self, **fields: Any) -> dict[str, Any]:
        return _ok(self.api.post(CHAT, self.long_body(**fields)))

    @cached_property
    def plain(self) -> dict[str, Any]:
        return self.chat()

    @property
    def plain_text(self) -> str:
        return _text(self.plain)


def run_checks(api: Api, model: str, on_progress: Callable[[CheckResult], None] | None = None) -> list[CheckResult]:
    """Run every check in order; `on_progress` sees each result as it comes."""
    server = Server(api, model)
    results: list[CheckResult] = []
    silent = 0  # timeouts in a row
    for item in CHECKS:
        if silent >= item.give_up:
            why = f"not asked: the server did not answer {silent} times"
            result = CheckResult(name=item.name, status="FAIL", detail=why)
        else:
            result, timed_out = _run(item, server)
            silent = silent + 1 if timed_out else 0
        results.append(result)
        if on_progress is not None:
            on_progress(result)
    return results


def _run(item: Check, server: Server) -> tuple[CheckResult, bool]:
    """What came of it, and whether that was a timeout."""
    try:
        return CheckResult(name=item.name, status="PASS", detail=item.run(server)), False
    except MeltcoreError as error:
        why, timed_out = str(error), isinstance(error, ApiTimeoutError)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        why, timed_out = f"a field is missing or of another type: {error!r}", False
    return CheckResult(name=item.name, status="FAIL", detail=why), timed_out


@check("GET /health answers 200")
def _health(server: Server) -> str:
    _expect(server.api.get("/health").status, 200, "status")
    return ""


@check("GET /v1/models lists the model")
def _models(server: Server) -> str:
    answer = _ok(server.api.get("/v1/models"))
    _expect(answer["object"], "list", "object")
    names = [entry["id"] for entry in answer["data"] if entry["object"] == "model"]
    if server.model not in names:
        raise Mismatch(f"{server.model!r} is not among {names}")
    return f"{len(names)} named"


@check("a chat answer has OpenAI's fields", ANSWER)
def _chat_fields(server: Server) -> str:
    answer, choice = server.plain, server.plain["choices"][0]
    _expect(answer["object"], "chat.completion", "object")
    _expect(choice["index"], 0, "choices[0].index")
    _expect(choice["message"]["role"], "assistant", "role")
    for field, kind in (("id", str), ("model", str), ("created", int)):
        if not isinstance(answer[field], kind):
            raise Mismatch(f"{field} is {answer[field]!r}")
    if not server.plain_text:
        raise Mismatch("the answer is empty")
    return repr(server.plain_text[:60])


@check("thinking stays out of the answer's content", ANSWER)
def _no_thinking(server: Server) -> str:
    text = server.plain_text
    if "<think>" in text or "</think>" in text:
        raise Mismatch(f"the answer holds thinking tags: {text[:60]!r}")
    return ""


@check("usage adds up", ANSWER)
def _usage(server: Server) -> str:
    usage = server.plain["usage"]
    prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
    _expect(usage["total_tokens"], prompt + completion, "total_tokens")
    if prompt < 1 or completion < 1:
        raise Mismatch(f"{prompt} prompt and {completion} completion tokens")
    return f"{prompt} + {completion} tokens"


@check("finish_reason is length when max_tokens ends the answer", ANSWER)
def _finish_length(server: Server) -> str:
    answer = server.long_chat(max_tokens=2)
    _expect(answer["choices"][0]["finish_reason"], "length", "finish_reason")
    _expect(answer["usage"]["completion_tokens"], 2, "completion_tokens")
    return ""


@check("max_completion_tokens means the same as max_tokens", ANSWER)
def _max_completion_tokens(server: Server) -> str:
    body = server.long_body(max_completion_tokens=2)
    del body["max_tokens"]
    _expect(_ok(server.api.post(CHAT, body))["usage"]["completion_tokens"], 2, "completion_tokens")
    return ""


@check("the same greedy request gives the same text", ANSWER)
def _repeatable(server: Server) -> str:
    _expect(_text(server.chat()), server.plain_text, "text")
    return ""


@check("a stop string ends the answer and stays out of it", ANSWER)
def _stop_string(server: Server) -> str:
    text = _text(server.long_chat())
    if not text:
        raise Mismatch("the answer is empty: there is nothing to be stopped")
    stop = text[len(text) // 2 : len(text) // 2 + 2] if len(text) >= 4 else text[-1]
    answer = server.long_chat(stop=[stop])
    content = answer["choices"][0]["message"]["content"] or ""  # null says that nothing is left, too
    _expect(content, text[: text.index(stop)], f"text with stop {stop!r}")
    _expect(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
    return f"stopped at {stop!r}"


@check("a streamed chat gives the same text in chunks, then [DONE]", ANSWER)
def _stream(server: Server) -> str:
    chunks = _stream_chunks(server, stream=True)
    if {chunk["object"] for chunk in chunks} != {"chat.completion.chunk"} or len(
        {chunk["id"] for chunk in chunks}
    ) != 1:
        raise Mismatch("chunks are not all chat.completion.chunk with one id")
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    _expect(choices[0]["delta"].get("role"), "assistant", "role of the first chunk")
    _expect("".join(choice["delta"].get("content") or "" for choice in choices), server.plain_text, "streamed text")
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    _expect(reasons, [server.plain["choices"][0]["finish_reason"]], "finish reasons")
    return f"{len(chunks)} chunks"


@check("stream_options.include_usage adds a last chunk with the usage", ANSWER)
def _stream_usage(server: Server) -> str:
    last = _stream_chunks(server, stream=True, stream_options={"include_usage": True})[-1]
    _expect(last["choices"], [], "choices of the last chunk")
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        _expect(last["usage"][field], server.plain["usage"][field], field)
    return ""


@check("POST /v1/completions answers text", ANSWER)
def _completions(server: Server) -> str:
    body = {"model": server.model, "prompt": _QUESTION, "max_tokens": 4, "temperature": 0.0}
    answer = _ok(server.api.post(COMPLETIONS, body))
    _expect(answer["object"], "text_completion", "object")
    text = answer["choices"][0]["text"]
    if not isinstance(text, str):
        raise Mismatch(f"text is {text!r}")
    return repr(text)


@check("an unknown model is a 404 error object", REFUSAL)
def _unknown_model(server: Server) -> str:
    return _expect_error(server.api.post(CHAT, server.chat_body(model="no-such-model")), 404)


@check("broken JSON is a 400 error object", REFUSAL)
def _broken_json(server: Server) -> str:
    return _expect_error(server.api.post(CHAT, b'{"model": '), 400)


@check("empty messages are a 400 error object", REFUSAL)
def _empty_messages(server: Server) -> str:
    return _expect_error(server.api.post(CHAT, server.chat_body(messages=[])), 400)


@check("an unknown role is a 400 error object", REFUSAL)
def _unknown_role(server: Server) -> str:
    return _expect_error(server.api.post(CHAT, server.chat_body(messages=[{"role": "wizard", "content": "x"}])), 400)


@check("max_tokens of a wrong type is a 400 error object", REFUSAL)
def _wrong_type(server: Server) -> str:
    return _expect_error(server.api.post(CHAT, server.chat_body(max_tokens="ten")), 400)


@check("max_tokens 0 is a 400 error object", REFUSAL)
def _zero_tokens(server: Server) -> str:
    return _expect_error(server.api.post(CHAT, server.chat_body(max_tokens=0)), 400)


@check("a temperature of NaN is a 400 error object", REFUSAL)
def _nan(server: Server) -> str:
    body = json.dumps(server.chat_body(temperature=float("nan"))).encode()
    return _expect_error(server.api.post(CHAT, body), 400)


@check("a path that does not exist is a 404")
def _unknown_path(server: Server) -> str:
    _expect(server.api.get("/v1/no-such-path").status, 404, "status")
    return ""


def _ok(reply: Reply) -> dict[str, Any]:
    if reply.status != 200:
        raise Mismatch(f"status {reply.status}: {reply.body[:120].decode(errors='replace')}")
    found = reply.json()
    if not isinstance(found, dict):
        raise Mismatch(f"the body is no JSON object: {str(found)[:80]}")
    return found


def _text(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise Mismatch(f"content is {content!r}")
    return content


def _stream_chunks(server: Server, **fields: Any) -> list[dict[str, Any]]:
    reply = server.api.post(CHAT, server.chat_body(**fields))
    _expect(reply.status, 200, "status")
    events = reply.events()
    _expect(events[-1:], ["[DONE]"], "last event")
    return [json.loads(event) for event in events[:-1]]


def _expect(seen: object, wanted: object, what: str) -> None:
    if seen != wanted:
        raise Mismatch(f"{what} is {seen!r}, not {wanted!r}")


def _expect_error(reply: Reply, status: int) -> str:
    _expect(reply.status, status, "status")
    error = reply.json()["error"]
    if not isinstance(error["message"], str) or not error["message"] or not isinstance(error["type"], str):
        raise Mismatch(f"error is {error!r}")
    for field in ("param", "code"):
        if field not in error:
            raise Mismatch(f"error has no {field!r}")
    return str(error["message"])[:120]
