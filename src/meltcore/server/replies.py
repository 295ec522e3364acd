"""The answers, in OpenAI's two forms, as bytes.

A stream's events differ only in a few values, so each is put together from byte strings made once a request; building a
dictionary and encoding it for every token would cost more than the token's way through the rest of this process.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any

import msgspec

from meltcore.engine.messages import TokenLogprobs
from meltcore.server.generation import Choice, Generation
from meltcore.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot write

_json = msgspec.json.Encoder().encode
_FINISH = {None: b"null", "stop": b'"stop"', "length": b'"length"'}
_Position = tuple[int, TokenLogprobs]


class Reply(ABC):
    """One request's answer in one of the two forms."""

    id_prefix: str
    stream_object: str
    full_object: str

    def __init__(self, generation: Generation, model: str, tokenizer: Tokenizer, *, usage_in_events: bool) -> None:
        """`usage_in_events`: the usage so far in every event, not only in the last."""
        self._id = self.id_prefix + generation.request_id
        self._created = int(time.time())
        self._model = model
        self._tokenizer = tokenizer
        self._usage_in_events = usage_in_events
        head = {"id": self._id, "object": self.stream_object, "created": self._created, "model": model}
        self._head = b"data: " + _json(head)[:-1] + b',"choices":['

    def event(self, choice: Choice) -> bytes:
        """One server-sent event with all that `choice` has not sent yet."""
        head, body = self._head, self._event_choice(choice)
        if not self._usage_in_events:
            return b"%s%s]}\n\n" % (head, body)
        usage = _usage(choice.prompt_tokens, choice.output_tokens, choice.cached_tokens)
        return b'%s%s],"usage":%s}\n\n' % (head, body, usage)

    def usage_event(self, generation: Generation) -> bytes:
        """The event after the last one of the answer, with the whole usage and no choices."""
        return b'%s],"usage":%s}\n\n' % (self._head, usage_json(generation.choices))

    def body(self, generation: Generation) -> bytes:
        """The whole answer at once."""
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
    def _logprobs(self, choice: Choice, positions: list[_Position]) -> dict[str, Any]: ...

    def _take_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.params.logprobs is None:
            return None
        return self._logprobs(choice, choice.take_logprobs())

    def _logprobs_json(self, choice: Choice) -> bytes:
        return b"null" if choice.params.logprobs is None else _json(self._take_logprobs(choice))

    def _token_text(self, token_id: int) -> str:
        return self._tokenizer.piece(token_id).decode(errors="replace")


class ChatReply(Reply):
    id_prefix = "chatcmpl-"
    stream_object = "chat.completion.chunk"
    full_object = "chat.completion"

    def _event_choice(self, choice: Choice) -> bytes:
        # The role rides on the first text: an event of its own would look like a first token that is none.
        role = b"" if choice.role_sent else b'"role":"assistant",'
        choice.role_sent = True
        thoughts = b'"reasoning_content":%s,' % _json(choice.take_thoughts()) if choice.thoughts else b""
        return b'{"index":%d,"delta":{%s%s"content":%s},"logprobs":%s,"finish_reason":%s}' % (
            choice.index,
            role,
            thoughts,
            _json(choice.take_text()),
            self._logprobs_json(choice),
            _FINISH[choice.finish_reason],
        )

    def _full_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.take_text(), "refusal": None}
        if choice.thoughts:
            message["reasoning_content"] = choice.take_thoughts()
        return {
            "index": choice.index,
            "message": message,
            "logprobs": self._take_logprobs(choice),
            "finish_reason": choice.finish_reason,
        }

    def _logprobs(self, choice: Choice, positions: list[_Position]) -> dict[str, Any]:
        content = []
        for token_id, found in positions:
            top = list(zip(found.top_token_ids, found.top_logprobs, strict=True))[: choice.params.logprobs]
            content.append(
                {
                    **self._entry(token_id, found.chosen),
                    "top_logprobs": [self._entry(top_id, logprob) for top_id, logprob in top],
                }
            )
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float) -> dict[str, Any]:
        piece = self._tokenizer.piece(token_id)
        return {"token": piece.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(piece)}


class CompletionReply(Reply):
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

    def _logprobs(self, choice: Choice, positions: list[_Position]) -> dict[str, Any]:
        tokens = [self._token_text(token_id) for token_id, _ in positions]
        offsets = []
        for token in tokens:
            offsets.append(choice.logprob_offset)
            choice.logprob_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(found.chosen) for _, found in positions],
            "top_logprobs": [self._top(choice, found) for _, found in positions],
            "text_offset": offsets,
        }

    def _top(self, choice: Choice, found: TokenLogprobs) -> dict[str, float]:
        pairs = list(zip(found.top_token_ids, found.top_logprobs, strict=True))[: choice.params.logprobs]
        # Two ids may show the same text (an unfinished character, say); the likelier one, which comes first, stays.
        return {self._token_text(token_id): _finite(logprob) for token_id, logprob in reversed(pairs)}


def usage_json(choices: list[Choice]) -> bytes:
    """OpenAI's usage object over `choices`, counted in the engine's own token ids."""
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


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
