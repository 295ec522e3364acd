"""Writes responses in OpenAI's forms for chats and completions, as bytes.

The events of a stream differ only in a few values. So the constant parts of an event are made into byte strings once
per request. Building and encoding a dictionary per token would cost more than everything else this process does for the
token.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from meltcore.common.errors import RequestError
from meltcore.protocol.generation import TokenLogprobs
from meltcore.serve.requests.asgi import ErrorForm, error_json
from meltcore.serve.requests.protocol import StreamOptions
from meltcore.serve.tasks.generation.generation_ticket import Choice, GenerationTicket
from meltcore.text.call_scanners import CallDelta, divide_pieces

OBFUSCATED_BYTES = 64  # the lengths of padded events differ by multiples of it
DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write

_json = msgspec.json.Encoder().encode
_FINISH = {None: b"null"} | {reason: b'"%s"' % reason.encode() for reason in ("stop", "length", "tool_calls")}
_LogprobsEntry = tuple[int, TokenLogprobs | None]  # None: a prompt's first token


class ResponseWriter(ABC):
    """Writes the response to one request. Subclasses have the forms for chats and completions."""

    id_prefix: str
    stream_object: str
    full_object: str
    # Seconds of silence before the first event and between events, after which `waiting_events` are sent.
    waits_s: tuple[float | None, float | None] = (None, None)

    def __init__(self, ticket: GenerationTicket, model: str, options: StreamOptions) -> None:
        """Create a writer.

        `options` say whether every event has the usage so far, or only the last event has the usage.
        """
        self._id = self.id_prefix + ticket.exchange.identity
        self._created = int(time.time())
        self._model = model
        self._has_usage_event = bool(options.include_usage)
        self._usage_in_events = bool(options.continuous_usage_stats)
        self.is_padded = bool(options.include_obfuscation)
        self._event_end = b'],"usage":null' if options.include_usage else b"]"
        self._notes = {"weakened_schema": ticket.weakened} if ticket.weakened else {}
        shared_fields = {
            "id": self._id,
            "object": self.stream_object,
            "created": self._created,
            "model": model,
            **self._notes,
        }
        self._event_start = b"data: " + _json(shared_fields)[:-1] + b',"choices":['

    def event(self, choice: Choice) -> bytes:
        """Return one server-sent event with the unsent output of `choice`."""
        event_start, body, end = self._event_start, self._event_choice(choice), self._event_end
        if self._usage_in_events:
            end = b'],"usage":%s' % _usage(choice)
        if self.is_padded:
            end += b',"obfuscation":"%s"' % padding(len(event_start) + len(body) + len(end)).encode()
        return b"%s%s%s}\n\n" % (event_start, body, end)

    def waiting_events(self, ticket: GenerationTicket) -> list[bytes]:  # noqa: ARG002 - some APIs have such events
        """Return the events that a client receives while there is no new output."""
        return []

    def end_events(self, ticket: GenerationTicket) -> list[bytes]:
        """Return the last events of a stream: the usage of the whole request if it was asked for, and [DONE]."""
        usage = b'%s],"usage":%s}\n\n' % (self._event_start, _usage(ticket))
        return [usage, DONE] if self._has_usage_event else [DONE]

    def error_event(self, error: RequestError, form: ErrorForm) -> bytes:
        """Return the event that ends a stream after `error`, in the form of the API that was asked."""
        return b"event: error\ndata: " + error_json(error, form) + b"\n\n"

    def body(self, ticket: GenerationTicket) -> bytes:
        """Return the whole response body as JSON."""
        return _json(
            {
                "id": self._id,
                "object": self.full_object,
                "created": self._created,
                "model": self._model,
                **self._notes,
                "choices": [self._full_choice(choice) for choice in ticket.answers()],
                "usage": msgspec.Raw(_usage(ticket)),
            }
        )

    @abstractmethod
    def _event_choice(self, choice: Choice) -> bytes: ...

    @abstractmethod
    def _full_choice(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs(self, choice: Choice, entries: list[_LogprobsEntry]) -> dict[str, Any]: ...

    def _take_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.params.logprobs is None:
            return None
        return self._logprobs(choice, choice.take_logprobs())

    def _logprobs_json(self, choice: Choice) -> bytes:
        return b"null" if choice.params.logprobs is None else _json(self._take_logprobs(choice))


class ChatResponseWriter(ResponseWriter):
    """Writes responses of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    stream_object = "chat.completion.chunk"
    full_object = "chat.completion"

    def _event_choice(self, choice: Choice) -> bytes:
        # The role comes with the first text: an event of its own would look like a first token.
        role = b"" if choice.role_sent else b'"role":"assistant",'
        choice.role_sent = True
        calls = reasoning = b""
        if choice.pieces:
            reasoning_texts, deltas = divide_pieces(choice.take_pieces())
            if reasoning_texts:
                text = _json("".join(reasoning_texts))
                reasoning = b'"reasoning_content":%s,"reasoning":%s,' % (text, text)
            if parts := _call_deltas(choice, deltas):
                calls = b',"tool_calls":' + _json(parts)
        return b'{"index":%d,"delta":{%s%s"content":%s%s},"logprobs":%s,"finish_reason":%s}' % (
            choice.index,
            role,
            reasoning,
            _json(choice.take_text() or (None if calls else "")),
            calls,
            self._logprobs_json(choice),
            _FINISH[choice.shown_finish_reason],
        )

    def _full_choice(self, choice: Choice) -> dict[str, Any]:
        reasoning_texts, deltas = divide_pieces(choice.take_pieces())
        calls = _whole_calls(choice, deltas)
        text = choice.take_text() or (None if calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if reasoning_texts:
            message["reasoning_content"] = message["reasoning"] = "".join(reasoning_texts)
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._take_logprobs(choice),
            "finish_reason": choice.shown_finish_reason,
        }

    def _logprobs(self, choice: Choice, entries: list[_LogprobsEntry]) -> dict[str, Any]:
        content = []
        for token_id, token_logprobs in entries:
            assert token_logprobs is not None, "a chat answer echoes no prompt"
            is_first = choice.begins_text(token_id)
            top_logprobs_list = list(zip(token_logprobs.top_token_ids, token_logprobs.top_logprobs, strict=True))[
                : choice.params.logprobs
            ]
            content.append(
                {
                    **self._entry(choice, token_id, token_logprobs.logprob, is_first=is_first),
                    "top_logprobs": [
                        self._entry(choice, top_id, logprob, is_first=is_first) for top_id, logprob in top_logprobs_list
                    ],
                }
            )
        return {"content": content, "refusal": None}

    def _entry(self, choice: Choice, token_id: int, logprob: float, *, is_first: bool) -> dict[str, Any]:
        data = _token_bytes(choice, token_id, is_first=is_first)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionResponseWriter(ResponseWriter):
    """Writes responses of /v1/completions."""

    id_prefix = "cmpl-"
    stream_object = "text_completion"
    full_object = "text_completion"

    def _event_choice(self, choice: Choice) -> bytes:
        return b'{"index":%d,"text":%s,"logprobs":%s,"finish_reason":%s}' % (
            choice.index,
            _json(choice.take_text()),
            self._logprobs_json(choice),
            _FINISH[choice.finish_reason],
        )

    def _full_choice(self, choice: Choice) -> dict[str, Any]:
        return {
            "index": choice.index,
            "text": choice.take_text(),
            "logprobs": self._take_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, entries: list[_LogprobsEntry]) -> dict[str, Any]:
        firsts = [choice.begins_text(token_id) for token_id, _ in entries]
        tokens = [
            _token_key(choice, token_id, is_first=first) for (token_id, _), first in zip(entries, firsts, strict=True)
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if token_logprobs is None else _finite(token_logprobs.logprob) for _, token_logprobs in entries
            ],
            "top_logprobs": [
                None
                if token_logprobs is None
                else _top_logprobs(choice, tokens[at], token_id, token_logprobs, is_first=firsts[at])
                for at, (token_id, token_logprobs) in enumerate(entries)
            ],
            "text_offset": [choice.logprob_text_offset(token_id) for token_id, _ in entries],
        }


def padding(num_bytes: int) -> str:
    """Return random text that makes the length of an event of `num_bytes` a multiple of OBFUSCATED_BYTES."""
    length = OBFUSCATED_BYTES - num_bytes % OBFUSCATED_BYTES
    return secrets.token_urlsafe(length)[:length]


def _call_deltas(choice: Choice, deltas: list[CallDelta]) -> list[dict[str, Any]]:
    """Return parts of calls in OpenAI's form. The first part of a call has its id and its name."""
    found: dict[int, dict[str, Any]] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        if delta.name is not None:
            head = {"index": delta.call_index, "id": choice.new_call_id(), "type": "function"}
            found[delta.call_index] = head | {"function": {"name": delta.name}}
        if delta.name is not None or delta.arguments:
            arguments.setdefault(delta.call_index, []).append(delta.arguments)
    for index, parts in arguments.items():
        function = found.setdefault(index, {"index": index, "function": {}})["function"]
        function["arguments"] = "".join(parts)
    return list(found.values())


def _whole_calls(choice: Choice, deltas: list[CallDelta]) -> list[dict[str, Any]]:
    """Return the calls of an answer in OpenAI's form. Broken calls are part of the answer's text."""
    broken = {delta.call_index for delta in deltas if delta.end == "broken"}
    calls = _call_deltas(choice, [delta for delta in deltas if delta.call_index not in broken])
    return [{name: value for name, value in call.items() if name != "index"} for call in calls]


def _usage(counted: Choice | GenerationTicket) -> bytes:
    """Return OpenAI's usage object, in tokens of the engine. That of a whole request sums over all choices."""
    prompt, output = counted.prompt_tokens, counted.output_tokens
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d},'
        b'"completion_tokens_details":{"reasoning_tokens":%d}}'
        % (prompt, output, prompt + output, counted.cached_tokens, counted.reasoning_tokens)
    )


def _top_logprobs(
    choice: Choice, token: str, token_id: int, token_logprobs: TokenLogprobs, *, is_first: bool
) -> dict[str, float]:
    """Return the highest log-probabilities by token text.

    The generated token `token` is added at the end if it is not among them.
    """
    tops = zip(token_logprobs.top_token_ids, token_logprobs.top_logprobs, strict=True)
    found = dict(list(tops)[: choice.params.logprobs]) | {token_id: token_logprobs.logprob}
    keyed: dict[str, float] = {}
    for candidate_id, logprob in found.items():
        key = token if candidate_id == token_id else _token_key(choice, candidate_id, is_first=is_first)
        # Another token of the same text (a byte token beside the character, say) must not hide the chosen one.
        if (key == token and candidate_id != token_id) or key in keyed:
            key = _bytes_key(choice.tokenizer.token_bytes(candidate_id))
        keyed.setdefault(key, _finite(logprob))
    return keyed


def _token_key(choice: Choice, token_id: int, *, is_first: bool) -> str:
    """Return the text of a token as a key of `top_logprobs`.

    If the bytes of a token are not whole characters, the key shows the bytes, as OpenAI does.
    """
    data = _token_bytes(choice, token_id, is_first=is_first)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return _bytes_key(data)


def _token_bytes(choice: Choice, token_id: int, *, is_first: bool) -> bytes:
    """Return the bytes that a token adds to the text. `is_first` says whether the token begins the text."""
    data = choice.tokenizer.token_bytes(token_id)
    if is_first and data.startswith(b" "):  # which decoders of SentencePiece vocabularies drop
        return choice.tokenizer.decode([token_id], skip_special_tokens=False).encode()
    return data


def _bytes_key(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
