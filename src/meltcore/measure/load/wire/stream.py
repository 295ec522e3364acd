"""Reads one answer of the chat or completions API into a record, and decides whether it is complete or failed."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from meltcore.measure.load.config import AnswerRules
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.wire.http import ErrorEvent, EventParser, HttpError, NamedEvent
from meltcore.measure.load.wire.response import (
    BadJsonError,
    BaseResponse,
    decode_json,
    error_message,
    whole_count,
    whole_text,
)

MAX_TOKENS = 2**24  # of one request; the longest context of a published model has 10 million
IMPLAUSIBLE_USAGE = "implausible usage"
NO_EXTRA_RULES = AnswerRules()
_LABELS = frozenset({"type", "id", "format", "status", "role"})


class _Delta(msgspec.Struct):
    content: str | list[Any] | None = None  # a list: parts with a type, of which "text" ones are the answer
    reasoning_content: str | None = None
    reasoning: str | None = None  # its newer name; a server that sends both repeats the text
    thinking: str | None = None
    # Of any form: they are output where they hold a text that is no label.
    reasoning_details: Any = None
    thinking_blocks: Any = None
    images: Any = None
    refusal: Any = None
    tool_calls: Any = None
    function_call: Any = None
    audio: Any = None

    def has_other_output(self) -> bool:
        """Return whether an output arrived that is not plain content or reasoning, such as a tool call."""
        reasoning = [self.reasoning_details, self.thinking_blocks]
        calls = [self.tool_calls, self.function_call]
        return _has_text([self.content, self.refusal, *calls, *reasoning, self.images, self.audio])


class _Choice(msgspec.Struct):
    delta: _Delta | list[Any] | None = None  # chat, streamed; gateways in PHP write an empty object as []
    message: _Delta | None = None  # chat, unstreamed
    text: str | None = None  # completions
    finish_reason: str | None = None
    error: Any = None  # of the provider behind a gateway


_NO_CHOICE = _Choice()


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | float | None = None


class _Usage(msgspec.Struct):
    """The token counts of an answer. Some servers send floats. A count is None if the server reports none."""

    prompt_tokens: int | float | None = None
    completion_tokens: int | float | None = None
    prompt_tokens_details: _PromptDetails | list[Any] | None = None  # a list: counts by the kind of input


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | list[Any] | None = None
    error: Any = None
    object: Any = None  # this or `type` is "error" where the fields of an error stand beside it
    type: Any = None
    detail: Any = None  # FastAPI's error, which has no choices


_event_decoder = msgspec.json.Decoder(_Event)


def _has_text(value: Any) -> bool:
    """Return whether a JSON value contains a text other than a label. An empty part has labels only: an id, a type."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str) and each:
            return True
        if isinstance(each, dict):
            pending += [field for name, field in each.items() if name not in _LABELS]
        elif isinstance(each, list):
            pending += each
    return False


def _is_error(error: Any) -> bool:
    """Return whether this value reports an error.

    Gateways add an empty error, or one with empty fields, to events without an error.
    """
    return any(error.values()) if isinstance(error, dict) else bool(error)


def text_of(content: str | list[Any] | None) -> str | None:
    """Return the text of an answer's content, or None without content. Some servers send the content in parts."""
    if not isinstance(content, list):
        return content
    texts = (part.get("text") for part in content if isinstance(part, dict))
    return "".join(text for text in texts if isinstance(text, str))


class StreamedResponse(BaseResponse):
    """Reads one streamed answer into `record`, then calls `on_done` exactly once.

    An answer is complete if it has a finish reason, a proper end of the response, and text or counted tokens. Any other
    answer is a failure with its reason; `rules` can require more. The first token arrives with the first event of any
    output: content, reasoning, a refusal, a tool call or audio. Only the content is the answer. The record says whether
    `[DONE]` and the usage arrived. Without usage, the number of events with output is the token count.

    Impossible token counts fail the request: negative counts, more cached than prompt tokens, or no token for an answer
    with text. More output tokens than `max_output_tokens` fail the request too. A `max_output_tokens` of None is no
    limit.
    """

    __slots__ = (
        "_allow_empty",
        "_content",
        "_event_parser",
        "_event_times",
        "_event_tokens",
        "_has_other_output",
        "_is_empty",
        "_max_output_tokens",
        "_reasoning",
        "_rules",
        "_saw_done",
        "_saw_usage",
    )

    CONTENT_TYPES = ("text/event-stream",)
    WRONG_TYPE_FAILURE = "not a stream"

    def __init__(
        self,
        record: RequestRecord,
        on_done: Callable[[StreamedResponse], None],
        *,
        keep_text: bool,
        rules: AnswerRules = NO_EXTRA_RULES,
        max_output_tokens: int | None = None,
    ) -> None:
        super().__init__(record, on_done)
        self._event_parser = EventParser()
        self._content: list[str] | None = [] if keep_text else None
        self._reasoning: list[str] = []
        self._event_times = array("d")
        self._event_tokens = array("I")
        self._rules = rules
        self._max_output_tokens = MAX_TOKENS if max_output_tokens is None else max_output_tokens
        self._allow_empty = rules.allow_empty
        self._has_other_output = False
        self._is_empty = False
        self._saw_done = False
        self._saw_usage = False

    @property
    def content(self) -> str:
        """Return the answer without the text that the server marks as reasoning."""
        return whole_text("".join(self._content or ()))

    @property
    def reasoning(self) -> str:
        """Return the text that the server marks as reasoning."""
        return whole_text("".join(self._reasoning))

    @property
    def is_text(self) -> bool:
        """Return whether the answer is content and reasoning alone."""
        return not self._has_other_output

    # --- callbacks of the connection

    def on_body(self, data: bytes) -> None:
        """Decode the events in `data`, or collect the body of an error response."""
        if self._on_done is None:
            return
        if self.record.status != 200:
            super().on_body(data)
            return
        try:
            events = self._event_parser.feed(data)
        except HttpError as error:
            self._finish("malformed response", str(error))
            return
        for event in events:
            if self._on_done is None:  # failed: its record was already delivered
                return
            if event.strip():  # else it was sent to keep the connection open
                self._on_event(event)

    # --- inside the stream

    def _on_event(self, data: bytes) -> None:
        if data.strip() == b"[DONE]":
            self._saw_done = True
            return
        try:
            event = decode_json(_event_decoder, data)
        except BadJsonError as error:
            if self._is_gateway_event(data):
                return
            self._finish("bad json", f"{error}: {data[:80]!r}")
            return
        choice = event.choices[0] if event.choices else _NO_CHOICE
        is_error = _is_error(event.error) or _is_error(choice.error) or "error" in (event.object, event.type)
        is_detail = _is_error(event.detail) and event.choices is None and event.usage is None
        if is_error or isinstance(data, ErrorEvent) or (is_detail and not self._is_gateway_event(data)):
            self._finish("error event", error_message(data.decode("utf-8", "replace")))
            return
        usage = event.usage if isinstance(event.usage, _Usage) else None
        count = None if usage is None else whole_count(usage.completion_tokens)
        if usage is not None and count is not None and not 0 <= count <= self._max_output_tokens:
            self._finish(IMPLAUSIBLE_USAGE, self._wrong_completion_tokens(usage.completion_tokens))
            return
        if event.choices:
            self._on_choice(choice, count)
        if usage is not None:
            self._on_usage(usage)

    def _is_gateway_event(self, data: bytes) -> bool:
        """Return whether an event is probably from a gateway and not part of the answer."""
        return self._saw_done or isinstance(data, NamedEvent)

    def _on_choice(self, choice: _Choice, count: int | None) -> None:
        """Record the new part of an answer.

        `count` is its number of tokens so far, or None if the event has no count.
        """
        delta = choice.delta if isinstance(choice.delta, _Delta) else choice.message
        content = choice.text if delta is None else text_of(delta.content)
        reasoning = None if delta is None else delta.reasoning_content or delta.reasoning or delta.thinking
        has_output = bool(content or reasoning)
        if not has_output and delta is not None and delta.has_other_output():
            has_output = self._has_other_output = True
        self._is_empty = self._allow_empty and choice.finish_reason == "stop" and not (has_output or self._event_times)
        if has_output or self._is_empty:
            self._event_times.append(self.now_s)
            if count is not None:
                self._event_tokens.append(count)
        if content and self._content is not None:
            self._content.append(content)
        if reasoning and self._content is not None:
            self._reasoning.append(reasoning)
        if choice.finish_reason or (choice.finish_reason is not None and self.record.finish_reason is None):
            self.record.finish_reason = whole_text(choice.finish_reason)

    def _on_usage(self, usage: _Usage) -> None:
        output_tokens, prompt_tokens = whole_count(usage.completion_tokens), whole_count(usage.prompt_tokens)
        if output_tokens is not None:
            self._saw_usage = True
            self.record.output_tokens = output_tokens
        if prompt_tokens is not None:
            self.record.prompt_tokens = prompt_tokens
        if isinstance(usage.prompt_tokens_details, _PromptDetails):
            self.record.cached_tokens = whole_count(usage.prompt_tokens_details.cached_tokens)

    def _wrong_completion_tokens(self, count: float | None) -> str:
        limit = f", the request allows at most {self._max_output_tokens}" if (whole_count(count) or 0) > 0 else ""
        return f"completion_tokens {count}{limit}"

    def _wrong_usage(self) -> str | None:
        """Return a text that names an impossible count of a complete answer, or None if all counts are possible.

        `completion_tokens` are checked earlier, with each event.
        """
        prompt_tokens, cached_tokens = self.record.prompt_tokens, self.record.cached_tokens
        if not 0 <= prompt_tokens <= MAX_TOKENS:
            return f"prompt_tokens {prompt_tokens}" + f", at most {MAX_TOKENS} are possible" * (prompt_tokens > 0)
        if cached_tokens is not None and not 0 <= cached_tokens <= prompt_tokens:
            return f"cached_tokens {cached_tokens}" + f" of prompt_tokens {prompt_tokens}" * (cached_tokens > 0)
        if not self.record.output_tokens and self._event_times and not self._is_empty:
            return f"completion_tokens 0 for {len(self._event_times)} events with text"
        return None

    def _find_failure(self) -> tuple[str | None, str | None]:
        """Return (reason, detail) of the failure if the response ended without a complete answer, else (None, None)."""
        record = self.record
        if self._event_parser.unfinished.strip() in (b"[DONE]", b"data: [DONE]", b"data:[DONE]"):
            self._saw_done = True  # some servers send no blank line after it
        elif self._event_parser.inside_event:
            return "truncated stream", "the last event is unfinished"
        if not record.finish_reason and not (record.finish_reason == "" and self._saw_done):  # "" on every event
            return "truncated stream", "no finish_reason"
        if record.finish_reason in ("abort", "error"):
            return "aborted by server", f"finish_reason is {record.finish_reason}"
        record.saw_done, record.saw_usage = self._saw_done, self._saw_usage
        if not self._saw_usage:
            if self._rules.needs_usage:
                return "no usage", "the server sent no usage although it was asked for; a --tokenizer can count instead"
            record.output_tokens = len(self._event_times)
        elif (usage_error := self._wrong_usage()) is not None:
            return IMPLAUSIBLE_USAGE, usage_error
        lacks_text = not self._event_times or (self._is_empty and record.output_tokens > 1)
        if lacks_text and (self._rules.needs_text or not record.output_tokens):
            return (
                "empty answer",
                f"no text, finish_reason {record.finish_reason}, {record.output_tokens} tokens reported",
            )
        return None, None

    def _complete_record(self) -> None:
        record = self.record
        if self._event_times:
            record.first_text_s = self._event_times[0]
            record.event_times = self._event_times.tobytes()
        if len(self._event_tokens) == len(self._event_times):
            record.event_tokens = self._event_tokens.tobytes()


class UnstreamedResponse(StreamedResponse):
    """Reads one unstreamed answer into `record`.

    The whole text is one event, which arrives at the end of the answer.
    """

    __slots__ = ("_body",)

    CONTENT_TYPES = ("application/json",)
    WRONG_TYPE_FAILURE = "not JSON"

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Begin the answer, or fail it as `StreamedResponse` does."""
        self._body: list[bytes] = []
        super().on_head(status, headers)

    def on_body(self, data: bytes) -> None:
        """Collect the bytes of the answer, or the body of an error response."""
        if self.record.status == 200:
            self._body.append(data)
        else:
            super().on_body(data)

    def on_end(self) -> None:
        """Decode the answer and complete the record."""
        if self.record.status == 200:
            self._on_event(b"".join(self._body))
            self._saw_done = True
        super().on_end()
