"""Responses in OpenAI's two forms, as bytes.

The events of a stream differ only in a few values, so each is formatted into byte strings made once per request.
Building and encoding a dictionary per token would cost more than everything else this process does for it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from meltcore.api.generation import Choice, Generation
from meltcore.protocol.generation import TokenLogprobs

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write

_json = msgspec.json.Encoder().encode
_FINISH = {None: b"null", "stop": b'"stop"', "length": b'"length"'}
_LogprobsEntry = tuple[int, TokenLogprobs | None]  # None: a prompt's first token


class ResponseWriter(ABC):
    """Writes the response to one request in one of the two forms."""

    id_prefix: str
    stream_object: str
    full_object: str

    def __init__(self, generation: Generation, model: str, *, usage_in_events: bool) -> None:
        """Create a writer. `usage_in_events`: write the usage so far in every event, not only in the last."""
        self._id = self.id_prefix + generation.request_id
        self._created = int(time.time())
        self._model = model
        self._usage_in_events = usage_in_events
        head = {"id": self._id, "object": self.stream_object, "created": self._created, "model": model}
        self._head = b"data: " + _json(head)[:-1] + b',"choices":['

    def event(self, choice: Choice) -> bytes:
        """Return one server-sent event with the unsent output of `choice`."""
        head, body = self._head, self._event_choice(choice)
        if not self._usage_in_events:
            return b"%s%s]}\n\n" % (head, body)
        usage = _usage(choice.prompt_tokens, choice.output_tokens, choice.cached_tokens)
        return b'%s%s],"usage":%s}\n\n' % (head, body, usage)

    def usage_event(self, generation: Generation) -> bytes:
        """Return the event after the last text: the whole usage, no choices."""
        return b'%s],"usage":%s}\n\n' % (self._head, usage_json(generation.choices))

    def body(self, generation: Generation) -> bytes:
        """Return the whole response."""
        return _json(
            {
                "id": self._id,
                "object": self.full_object,
                "created": self._created,
                "model": self._model,
                "choices": [self._full_choice(choice) for choice in generation.choices],
                "usage": msgspec.Raw(usage_json(generation.choices)),
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
    """Responses of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    stream_object = "chat.completion.chunk"
    full_object = "chat.completion"

    def _event_choice(self, choice: Choice) -> bytes:
        # The role comes with the first text: an event of its own would look like a first token.
        role = b"" if choice.role_sent else b'"role":"assistant",'
        choice.role_sent = True
        reasoning = b'"reasoning_content":%s,' % _json(choice.take_reasoning()) if choice.reasoning else b""
        return b'{"index":%d,"delta":{%s%s"content":%s},"logprobs":%s,"finish_reason":%s}' % (
            choice.index,
            role,
            reasoning,
            _json(choice.take_text()),
            self._logprobs_json(choice),
            _FINISH[choice.finish_reason],
        )

    def _full_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.take_text(), "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.take_reasoning()
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._take_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, entries: list[_LogprobsEntry]) -> dict[str, Any]:
        content = []
        for token_id, token_logprobs in entries:
            assert token_logprobs is not None, "a chat answer echoes no prompt"
            top_logprobs_list = list(zip(token_logprobs.top_token_ids, token_logprobs.top_logprobs, strict=True))[
                : choice.params.logprobs
            ]
            content.append(
                {
                    **self._entry(choice, token_id, token_logprobs.logprob),
                    "top_logprobs": [self._entry(choice, top_id, logprob) for top_id, logprob in top_logprobs_list],
                }
            )
        return {"content": content, "refusal": None}

    def _entry(self, choice: Choice, token_id: int, logprob: float) -> dict[str, Any]:
        data = choice.tokenizer.token_bytes(token_id)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionResponseWriter(ResponseWriter):
    """Responses of /v1/completions."""

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
        tokens = [_token_text(choice, token_id) for token_id, _ in entries]
        return {
            "tokens": tokens,
            "token_logprobs": [
                None if token_logprobs is None else _finite(token_logprobs.logprob) for _, token_logprobs in entries
            ],
            "top_logprobs": [
                None if token_logprobs is None else self._top_logprobs(choice, token_logprobs)
                for _, token_logprobs in entries
            ],
            "text_offset": [choice.logprob_text_offset(token_id) for token_id, _ in entries],
        }

    def _top_logprobs(self, choice: Choice, token_logprobs: TokenLogprobs) -> dict[str, float]:
        top_pairs = list(zip(token_logprobs.top_token_ids, token_logprobs.top_logprobs, strict=True))[
            : choice.params.logprobs
        ]
        # Two ids may have the same text (an unfinished character, say): the more probable one, the first, stays.
        return {_token_text(choice, token_id): _finite(logprob) for token_id, logprob in reversed(top_pairs)}


def usage_json(choices: list[Choice]) -> bytes:
    """Return OpenAI's usage object over `choices`, in tokens of the engine."""
    return _usage(
        sum(choice.prompt_tokens for choice in choices),
        sum(choice.output_tokens for choice in choices),
        sum(choice.cached_tokens for choice in choices),
    )


def _usage(prompt: int, output: int, cached: int) -> bytes:
    return (
        b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}'
        % (prompt, output, prompt + output, cached)
    )


def _token_text(choice: Choice, token_id: int) -> str:
    return choice.tokenizer.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
