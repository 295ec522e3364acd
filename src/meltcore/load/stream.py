"""One streamed completion, from its first byte to a Record: what counts as text, as the end, and as a failure."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable

import msgspec

from meltcore.load.http import EventParser, HttpError
from meltcore.load.record import Record

MAX_ERROR_BODY_BYTES = 64 * 1024
MAX_DETAIL_CHARS = 300


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # its newer name; a server that sends both says the same in both


class _Choice(msgspec.Struct):
    delta: _Delta | None = None  # chat form
    message: _Delta | None = None  # chat form, of an answer that comes whole
    text: str | None = None  # completions form
    finish_reason: str | None = None


class _PromptDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw()


class _ErrorText(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorText | str = ""
    message: str = ""
    detail: str | None = None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_error = msgspec.json.Decoder(_ErrorBody).decode


class StreamExchange:
    """Reads one streamed answer of the chat or completions form into `record`, then calls `on_done` exactly once.

    An answer is whole when it had text, a finish reason, `[DONE]` and the usage. Anything less is a failure with its
    reason. Text is content and reasoning: both are tokens that a user waited for; the content alone is the answer.
    `may_be_empty`: an end token alone is an answer too, which came when its finish reason did.
    """

    __slots__ = (
        "_chunk_times",
        "_chunk_tokens",
        "_empty",
        "_events",
        "_may_be_empty",
        "_on_done",
        "_parts",
        "_saw_done",
        "_saw_usage",
        "_thoughts",
        "now_s",
        "record",
    )

    CONTENT_TYPE = "text/event-stream"
    NOT_THAT = "not a stream"

    def __init__(
        self,
        record: Record,
        on_done: Callable[[StreamExchange], None],
        *,
        keep_text: bool,
        may_be_empty: bool = False,
    ) -> None:
        self.record = record
        self.now_s = 0.0
        self._on_done: Callable[[StreamExchange], None] | None = on_done
        self._events = EventParser()
        self._parts: list[str] | None = [] if keep_text else None
        self._thoughts: list[str] = []
        self._chunk_times = array("d")
        self._chunk_tokens = array("I")
        self._may_be_empty = may_be_empty
        self._empty = False
        self._saw_done = False
        self._saw_usage = False

    @property
    def answer(self) -> str:
        """What was said, without what a server tells apart from it as reasoning."""
        return "".join(self._parts or ())

    @property
    def thoughts(self) -> str:
        return "".join(self._thoughts)

    @property
    def text_chunks(self) -> int:
        return len(self._chunk_times)

    # --- what the connection tells us

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.record.status = status
        if status == 200 and not headers.get("content-type", "").lower().startswith(self.CONTENT_TYPE):
            self._end(self.NOT_THAT, f"content-type is {headers.get('content-type', 'absent')}")

    def on_body(self, data: bytes) -> None:
        if self._on_done is None:
            return
        if self.record.status != 200:
            if self._parts is None:
                self._parts = []
            if sum(map(len, self._parts)) < MAX_ERROR_BODY_BYTES:
                self._parts.append(data.decode("utf-8", "replace"))
            return
        try:
            events = self._events.feed(data)
        except HttpError as error:
            self._end("malformed response", str(error))
            return
        for event in events:
            if self._on_done is None:  # failed: its record is already out of our hands
                return
            self._event(event)

    def on_end(self) -> None:
        if self.record.status != 200:
            self._end(f"http {self.record.status}", error_message(self.answer))
        else:
            self._end(*self._verdict())

    def on_failure(self, reason: str, detail: str) -> None:
        self._end(reason, detail)

    # --- inside the stream

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._saw_done = True
            return
        try:
            event = _decode_event(data)
        except msgspec.DecodeError as error:
            self._end("bad json", f"{error}: {data[:80]!r}")
            return
        usage = event.usage
        if event.choices:
            choice = event.choices[0]
            delta = choice.delta or choice.message
            answer = choice.text if delta is None else delta.content
            thought = None if delta is None else delta.reasoning_content or delta.reasoning
            text = answer or thought
            self._empty = self._may_be_empty and choice.finish_reason == "stop" and not (text or self._chunk_times)
            if text or self._empty:
                self._chunk_times.append(self.now_s)
                if usage is not None:
                    self._chunk_tokens.append(usage.completion_tokens)
            if answer and self._parts is not None:
                self._parts.append(answer)
            if thought and self._parts is not None:
                self._thoughts.append(thought)
            if choice.finish_reason is not None:
                self.record.finish_reason = choice.finish_reason
        elif event.error:
            self._end("error event", error_message(data.decode("utf-8", "replace")))
        if usage is not None:
            self._usage(usage)

    def _usage(self, usage: _Usage) -> None:
        self._saw_usage = True
        self.record.prompt_tokens = usage.prompt_tokens
        self.record.output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            self.record.cached_tokens = usage.prompt_tokens_details.cached_tokens

    def _verdict(self) -> tuple[str | None, str | None]:
        """(failure, detail) of a stream that ended in good HTTP order."""
        record = self.record
        if self._events.inside_event:
            return "truncated stream", "the last event is unfinished"
        if record.finish_reason is None:
            return "truncated stream", "no finish_reason"
        if not self._saw_done:
            return "truncated stream", "no [DONE]"
        if record.finish_reason in ("abort", "error"):
            return "aborted by server", f"finish_reason is {record.finish_reason}"
        if not self._saw_usage:
            return "no usage", "the server sent no usage although stream_options.include_usage asked for it"
        if not self._chunk_times or (self._empty and record.output_tokens > 1):
            return (
                "empty answer",
                f"no text, finish_reason {record.finish_reason}, {record.output_tokens} tokens reported",
            )
        return None, None

    def _end(self, failure: str | None, detail: str | None) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is None:  # failed before, and the rest of its bytes still came in
            return
        record = self.record
        record.ended_s = self.now_s or time.monotonic()
        record.failure = failure
        record.detail = None if detail is None else detail[:MAX_DETAIL_CHARS]
        if self._chunk_times:
            record.first_text_s = self._chunk_times[0]
            record.chunk_times = self._chunk_times.tobytes()
        if len(self._chunk_tokens) == len(self._chunk_times):
            record.chunk_tokens = self._chunk_tokens.tobytes()
        on_done(self)


class WholeExchange(StreamExchange):
    """Reads one answer that was not asked to be streamed: all of its text is one chunk, which comes at its end."""

    __slots__ = ("_body",)

    CONTENT_TYPE = "application/json"
    NOT_THAT = "not JSON"

    def __init__(
        self,
        record: Record,
        on_done: Callable[[StreamExchange], None],
        *,
        keep_text: bool,
        may_be_empty: bool = False,
    ) -> None:
        super().__init__(record, on_done, keep_text=keep_text, may_be_empty=may_be_empty)
        self._body: list[bytes] = []

    def on_body(self, data: bytes) -> None:
        if self.record.status == 200:
            self._body.append(data)
        else:
            super().on_body(data)

    def on_end(self) -> None:
        if self.record.status == 200:
            self._event(b"".join(self._body))
            self._saw_done = True
        super().on_end()


def error_message(body: str) -> str:
    """The message inside an OpenAI error form (or a near relative of it), else the body's beginning."""
    try:
        parsed = _decode_error(body.encode())
    except msgspec.DecodeError:
        return body[:MAX_DETAIL_CHARS] or "empty body"
    message = parsed.error if isinstance(parsed.error, str) else parsed.error.message
    return message or parsed.message or parsed.detail or body[:MAX_DETAIL_CHARS]
