"""Checks whether a server conforms to OpenAI's API. Each check has a name, PASS or FAIL, and its finding.

API: https://platform.openai.com/docs/api-reference. A check that cannot run fails. A check that is skipped because the
server has stopped answering fails too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar

from meltcore.common.errors import MeltcoreError
from meltcore.measure.documents.schema import CheckResult
from meltcore.measure.experiments.servers import Api, ApiResponse, ApiTimeoutError
from meltcore.measure.load.tasks.generation import CHAT_PATH, COMPLETIONS_PATH

_QUESTION = "What is 12 + 7?"
# Of a question whose answer is long enough to be cut: a number may be one token.
_LONG = {"messages": [{"role": "user", "content": "Count from 1 to 20."}]}
_MAX_TOKENS = 48
# Consecutive timeouts after which a check is skipped: one that needs an answer of the model, and one that a server can
# refuse without it, which gets one more attempt. All timeouts together would take half an hour.
MAX_ANSWER_TIMEOUTS, MAX_REFUSAL_TIMEOUTS = 2, 3


class MismatchError(MeltcoreError):
    """Reports that the server's answer violates the API."""


class NotApplicableError(MeltcoreError):
    """Reports that the server's answer shows nothing of what a check is about."""


@dataclass(frozen=True)
class Check:
    """Describes one check.

    `run` returns a short description of its observation, or None. It raises NotApplicableError if there is nothing to
    check, and another error if the check fails.
    """

    name: str
    run: Callable[[Server], str | None]
    max_timeouts: float  # consecutive ones, after which it is skipped


CHECKS: list[Check] = []
_Run = TypeVar("_Run", bound=Callable[["Server"], str | None])


def register_check(name: str, max_timeouts: float = math.inf) -> Callable[[_Run], _Run]:
    """Return a decorator that registers a function as the check called `name`."""

    def register(function: _Run) -> _Run:
        CHECKS.append(Check(name, function, max_timeouts))
        return function

    return register


@dataclass(frozen=True)
class Server:
    """Represents the server under test, with one plain chat answer that several checks use."""

    api: Api
    model: str

    def chat_body(self, **fields: Any) -> dict[str, Any]:
        """Return the request body of a short question."""
        messages = [{"role": "user", "content": _QUESTION}]
        return {"model": self.model, "messages": messages, "temperature": 0.0, "max_tokens": _MAX_TOKENS, **fields}

    def chat(self, **fields: Any) -> dict[str, Any]:
        """Ask the short question and return the response's JSON object."""
        return _parse_answer(self.api.post(CHAT_PATH, self.chat_body(**fields)))

    @cached_property
    def plain_answer(self) -> dict[str, Any]:
        """Return the answer to the short question. The answer is requested once and cached."""
        return self.chat()

    @property
    def plain_text(self) -> str:
        """Return the text of the answer to the short question."""
        return _answer_text(self.plain_answer)


def run_checks(
    api: Api, model: str, on_progress: Callable[[CheckResult], None] = lambda _check: None
) -> list[CheckResult]:
    """Run all checks and return their results, in the order of registration.

    `on_progress` receives each result as it arrives.
    """
    server = Server(api, model)
    results: list[CheckResult] = []
    num_timeouts = 0  # consecutive ones
    for check in CHECKS:
        if num_timeouts >= check.max_timeouts:
            detail = f"skipped: the server did not answer {num_timeouts} times"
            result = CheckResult(name=check.name, status="FAIL", detail=detail)
        else:
            result, timed_out = _run_check(check, server)
            num_timeouts = num_timeouts + 1 if timed_out else 0
        results.append(result)
        on_progress(result)
    return results


def _run_check(check: Check, server: Server) -> tuple[CheckResult, bool]:
    """Return the result of one check, and whether it was a timeout."""
    try:
        return CheckResult(name=check.name, status="PASS", detail=check.run(server) or ""), False
    except NotApplicableError as error:
        return CheckResult(name=check.name, status="NOT_APPLICABLE", detail=str(error)), False
    except MeltcoreError as error:
        detail, timed_out = str(error), isinstance(error, ApiTimeoutError)
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        detail, timed_out = f"a field is missing or of another type: {error!r}", False
    return CheckResult(name=check.name, status="FAIL", detail=detail), timed_out


@register_check("GET /health answers 200")
def _check_health(server: Server) -> None:
    _expect(server.api.get("/health").status, 200, "status")


@register_check("GET /v1/models lists the model")
def _check_models(server: Server) -> str:
    answer = _parse_answer(server.api.get("/v1/models"))
    _expect(answer["object"], "list", "object")
    model_names = [entry["id"] for entry in answer["data"] if entry["object"] == "model"]
    _require(server.model in model_names, f"{server.model!r} is not among {model_names}")
    return f"{len(model_names)} listed"


@register_check("a chat answer has OpenAI's fields", MAX_ANSWER_TIMEOUTS)
def _check_chat_fields(server: Server) -> str:
    answer, choice = server.plain_answer, server.plain_answer["choices"][0]
    _expect(answer["object"], "chat.completion", "object")
    _expect(choice["index"], 0, "choices[0].index")
    _expect(choice["message"]["role"], "assistant", "role")
    for field, expected_type in (("id", str), ("model", str), ("created", int)):
        _require(isinstance(answer[field], expected_type), f"{field} is {answer[field]!r}")
    _require(server.plain_text, "the answer is empty")
    return repr(server.plain_text[:60])


@register_check("reasoning stays out of the answer's content", MAX_ANSWER_TIMEOUTS)
def _check_no_reasoning(server: Server) -> None:
    text = server.plain_text
    _require("<think>" not in text and "</think>" not in text, f"the answer holds reasoning tags: {text[:60]!r}")
    message = server.plain_answer["choices"][0]["message"]
    if not (message.get("reasoning_content") or message.get("reasoning")):
        raise NotApplicableError("the model did not reason about a plain question")


@register_check("usage adds up", MAX_ANSWER_TIMEOUTS)
def _check_usage(server: Server) -> str:
    usage = server.plain_answer["usage"]
    prompt_tokens, completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    _expect(usage["total_tokens"], prompt_tokens + completion_tokens, "total_tokens")
    _require(
        min(prompt_tokens, completion_tokens) >= 1, f"{prompt_tokens} prompt and {completion_tokens} completion tokens"
    )
    return f"{prompt_tokens} + {completion_tokens} tokens"


@register_check("finish_reason is length when max_tokens ends the answer", MAX_ANSWER_TIMEOUTS)
def _check_finish_length(server: Server) -> None:
    answer = server.chat(**_LONG, max_tokens=2)
    _expect(answer["choices"][0]["finish_reason"], "length", "finish_reason")
    _expect(answer["usage"]["completion_tokens"], 2, "completion_tokens")


@register_check("max_completion_tokens means the same as max_tokens", MAX_ANSWER_TIMEOUTS)
def _check_max_completion_tokens(server: Server) -> None:
    body = server.chat_body(**_LONG, max_completion_tokens=2)
    del body["max_tokens"]
    _expect(_parse_answer(server.api.post(CHAT_PATH, body))["usage"]["completion_tokens"], 2, "completion_tokens")


@register_check("the same greedy request gives the same text", MAX_ANSWER_TIMEOUTS)
def _check_repeatable(server: Server) -> None:
    _expect(_answer_text(server.chat()), server.plain_text, "text")


@register_check("a stop string ends the answer and stays out of it", MAX_ANSWER_TIMEOUTS)
def _check_stop_string(server: Server) -> str:
    text = _answer_text(server.chat(**_LONG))
    _require(text, "the answer is empty: there is nothing to stop")
    stop = text[len(text) // 2 : len(text) // 2 + 2] if len(text) >= 4 else text[-1]
    answer = server.chat(**_LONG, stop=[stop])
    content = answer["choices"][0]["message"]["content"] or ""  # null means an empty text too
    _expect(content, text[: text.index(stop)], f"text with stop {stop!r}")
    _expect(answer["choices"][0]["finish_reason"], "stop", "finish_reason")
    return f"stopped at {stop!r}"


@register_check("a streamed chat gives the same text in chunks, then [DONE]", MAX_ANSWER_TIMEOUTS)
def _check_stream(server: Server) -> str:
    chunks = _request_chunks(server, stream=True)
    kinds, ids = {chunk["object"] for chunk in chunks}, {chunk["id"] for chunk in chunks}
    _require(
        kinds == {"chat.completion.chunk"} and len(ids) == 1, "chunks are not all chat.completion.chunk with one id"
    )
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    _expect(choices[0]["delta"].get("role"), "assistant", "role of the first chunk")
    _expect("".join(choice["delta"].get("content") or "" for choice in choices), server.plain_text, "streamed text")
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    _expect(reasons, [server.plain_answer["choices"][0]["finish_reason"]], "finish reasons")
    return f"{len(chunks)} chunks"


@register_check("stream_options.include_usage adds a last chunk with the usage", MAX_ANSWER_TIMEOUTS)
def _check_stream_usage(server: Server) -> None:
    last = _request_chunks(server, stream=True, stream_options={"include_usage": True})[-1]
    _expect(last["choices"], [], "choices of the last chunk")
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        _expect(last["usage"][field], server.plain_answer["usage"][field], field)


@register_check("POST /v1/completions answers text", MAX_ANSWER_TIMEOUTS)
def _check_completions(server: Server) -> str:
    body = {"model": server.model, "prompt": _QUESTION, "max_tokens": 4, "temperature": 0.0}
    answer = _parse_answer(server.api.post(COMPLETIONS_PATH, body))
    _expect(answer["object"], "text_completion", "object")
    text = answer["choices"][0]["text"]
    _require(isinstance(text, str), f"text is {text!r}")
    return repr(text)


# What a server must refuse: the status of its error, and the fields of the short question, or the bytes of a body.
_REFUSALS: dict[str, tuple[int, dict[str, Any] | bytes]] = {
    "an unknown model is a 404 error object": (404, {"model": "no-such-model"}),
    "broken JSON is a 400 error object": (400, b'{"model": '),
    "empty messages are a 400 error object": (400, {"messages": []}),
    "an unknown role is a 400 error object": (400, {"messages": [{"role": "wizard", "content": "x"}]}),
    "max_tokens of a wrong type is a 400 error object": (400, {"max_tokens": "ten"}),
    "max_tokens 0 is a 400 error object": (400, {"max_tokens": 0}),
    "a temperature of NaN is a 400 error object": (400, {"temperature": math.nan}),
}


def _check_refusal(server: Server, status: int, body: dict[str, Any] | bytes) -> str:
    response = server.api.post(CHAT_PATH, body if isinstance(body, bytes) else server.chat_body(**body))
    _expect(response.status, status, "status")
    error = response.json()["error"]
    has_texts = isinstance(error["message"], str) and error["message"] and isinstance(error["type"], str)
    _require(has_texts, f"error is {error!r}")
    for field in ("param", "code"):
        _require(field in error, f"error has no {field!r}")
    return str(error["message"])[:120]


for _name, (_status, _body) in _REFUSALS.items():
    register_check(_name, MAX_REFUSAL_TIMEOUTS)(partial(_check_refusal, status=_status, body=_body))


@register_check("a path that does not exist is a 404")
def _check_unknown_path(server: Server) -> None:
    _expect(server.api.get("/v1/no-such-path").status, 404, "status")


def _parse_answer(response: ApiResponse) -> dict[str, Any]:
    _require(response.status == 200, f"status {response.status}: {response.body[:120].decode(errors='replace')}")
    answer = response.json()
    if not isinstance(answer, dict):
        raise MismatchError(f"the body is not a JSON object: {str(answer)[:80]}")
    return answer


def _answer_text(answer: dict[str, Any]) -> str:
    content = answer["choices"][0]["message"]["content"]
    if not isinstance(content, str):
        raise MismatchError(f"content is {content!r}")
    return content


def _request_chunks(server: Server, **fields: Any) -> list[dict[str, Any]]:
    response = server.api.post(CHAT_PATH, server.chat_body(**fields))
    _expect(response.status, 200, "status")
    events = response.events()
    _expect(events[-1:], ["[DONE]"], "last event")
    return [json.loads(event) for event in events[:-1]]


def _expect(actual: object, expected: object, subject: str) -> None:
    _require(actual == expected, f"{subject} is {actual!r}, not {expected!r}")


def _require(condition: object, finding: str) -> None:
    if not condition:
        raise MismatchError(finding)
