"""Reads one response into a record: the base class of all responses, and the class of an unstreamed JSON document."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import msgspec

from meltcore.common.errors import MeltcoreError
from meltcore.common.options import is_number
from meltcore.measure.load.record import RequestRecord

MAX_ERROR_BODY_BYTES = 64 * 1024
MAX_DETAIL_CHARS = 300
_MAX_COUNT = 2**63 - 1
REFUSAL_STATUSES = (429, 503)  # a server may send Retry-After with them

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_Document = TypeVar("_Document")
MAX_JSON_BYTES = 16 * 2**20  # a transcript of three hours has 0.2 MB

Failure = tuple[str | None, str | None]
COMPLETE: Failure = (None, None)


class BadJsonError(MeltcoreError):
    """Reports bytes that are no JSON document of the expected form."""


def decode_json(decoder: msgspec.json.Decoder[_Document], data: bytes) -> _Document:
    """Return a JSON document. Raises BadJsonError for other bytes.

    JSON's grammar allows one half of a surrogate pair without the other, which msgspec rejects. Gateways in JavaScript
    cut texts between the two halves. `whole_text` joins the halves again.
    """
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if _SURROGATE.search(data) is None:
            raise BadJsonError(str(error)) from error
    try:
        return msgspec.convert(json.loads(data.decode(), parse_constant=_refuse), decoder.type)
    except (ValueError, RecursionError) as error:
        raise BadJsonError(str(error)) from error


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"JSON has no {constant}")


def whole_text(text: str) -> str:
    """Return `text` with its surrogate pairs joined. Half a pair becomes U+FFFD, since files cannot store it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def whole_count(count: float | None) -> int | None:
    """Return a token count as an integer for messages between processes. A fraction becomes -1, and None stays None."""
    if count is None:
        return None
    return max(-_MAX_COUNT, min(int(count), _MAX_COUNT)) if isinstance(count, int) or count.is_integer() else -1


class _ErrorText(msgspec.Struct):
    message: str | None = None


class _ErrorBody(msgspec.Struct):
    error: _ErrorText | str | None = None
    message: str | None = None
    detail: str | None = None


_error_decoder = msgspec.json.Decoder(_ErrorBody)


class BaseResponse:
    """Reads one response into `record`, then calls `on_done` exactly once. This class handles error responses.

    A status other than 200 is a failure, and so is a content type that does not begin with one of CONTENT_TYPES.
    """

    __slots__ = ("_error_body", "_on_done", "now_s", "record", "retry_after_s")

    CONTENT_TYPES: tuple[str, ...] = ()
    WRONG_TYPE_FAILURE = ""

    def __init__(self, record: RequestRecord, on_done: Callable[[Any], None]) -> None:
        self.record = record
        self.now_s = 0.0
        self._on_done: Callable[[Any], None] | None = on_done
        self._error_body = ""
        self.retry_after_s: float | None = None  # of a refusal that says when to come again

    @property
    def content(self) -> str:
        """Return the text of the answer, which is graded."""
        return ""

    @property
    def is_text(self) -> bool:
        """Return whether all of the answer is text, so that its tokens can be counted again."""
        return True

    @property
    def reasoning(self) -> str:
        """Return the text that the server marks as reasoning."""
        return ""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Store the status. If the content type is another one, fail the response."""
        self.record.status = status
        if status in REFUSAL_STATUSES:
            self.retry_after_s = _seconds(headers.get("retry-after", ""))
        if status == 200 and not headers.get("content-type", "").lower().startswith(self.CONTENT_TYPES):
            self._finish(self.WRONG_TYPE_FAILURE, f"content-type is {headers.get('content-type', 'absent')}")

    def on_body(self, data: bytes) -> None:
        """Collect the body of an error response."""
        if len(self._error_body) < MAX_ERROR_BODY_BYTES:
            self._error_body += data.decode("utf-8", "replace")

    def on_end(self) -> None:
        """Complete the record. An incomplete answer becomes a failure."""
        if self.record.status != 200:
            self._finish(f"http {self.record.status}", error_message(self._error_body))
        elif self._on_done is not None:
            self._finish(*self._find_failure())

    def on_failure(self, reason: str, detail: str) -> None:
        """Complete the record as a failure."""
        self._finish(reason, detail)

    def _find_failure(self) -> tuple[str | None, str | None]:
        """Return (reason, detail) of the failure if the response ended without a complete answer, else (None, None)."""
        raise NotImplementedError

    def _finish(self, failure: str | None, detail: str | None) -> None:
        on_done, self._on_done = self._on_done, None
        if on_done is None:  # failed before; the rest of its bytes was still received
            return
        record = self.record
        record.ended_s = self.now_s or time.monotonic()
        record.failure = failure
        record.detail = None if detail is None else whole_text(detail[:MAX_DETAIL_CHARS])
        self._complete_record()
        on_done(self)

    def _complete_record(self) -> None:
        """Add the measurements of the answer to the record."""


def _seconds(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After field. Returns None if it is missing or a date, which no engine sends."""
    return float(retry_after) if is_number(retry_after) else None


def error_message(body: str) -> str:
    """Return the message of an error object in OpenAI's or a similar form, or else the start of `body`."""
    try:
        error_body = decode_json(_error_decoder, body.encode())
    except BadJsonError:
        return body[:MAX_DETAIL_CHARS] or "empty body"
    error = error_body.error
    message = error.message if isinstance(error, _ErrorText) else error
    return message or error_body.message or error_body.detail or body[:MAX_DETAIL_CHARS]


class JsonResponse(BaseResponse):
    """Reads an answer that is one JSON document."""

    __slots__ = ("_content", "_keep_text", "_num_bytes", "_parts")

    CONTENT_TYPES = ("application/json",)
    WRONG_TYPE_FAILURE = "not JSON"

    def __init__(
        self,
        record: RequestRecord,
        on_done: Callable[[Any], None],
        *,
        keep_text: bool,
        max_output_tokens: int | None = None,
    ) -> None:
        """Store the record that the answer fills.

        `max_output_tokens` has no effect on answers without output tokens.
        """
        del max_output_tokens
        super().__init__(record, on_done)
        self._keep_text = keep_text
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._content = ""
        record.saw_usage = False

    @property
    def content(self) -> str:
        """Return the text of the answer, or "" if `keep_text` was not set."""
        return self._content

    def on_body(self, data: bytes) -> None:
        """Collect the answer, or the body of an error response."""
        if self.record.status != 200:
            super().on_body(data)
            return
        self._num_bytes += len(data)
        if self._num_bytes <= MAX_JSON_BYTES:
            self._parts.append(data)
        else:
            self._parts.clear()
            self._finish("malformed response", f"the answer is longer than {MAX_JSON_BYTES:,} bytes")

    def _find_failure(self) -> Failure:
        data = b"".join(self._parts)
        try:
            texts, failure = self._read(data)
        except BadJsonError as error:
            return "bad json", f"{error}: {data[:80]!r}"
        if all(texts):
            self.record.first_text_s = self.now_s
        if self._keep_text:
            self._content = whole_text("\n".join(texts))
        return failure

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        """Return the texts of the answer, and its failure. Raises BadJsonError if the document has another form."""
        raise NotImplementedError


class _Text(msgspec.Struct):
    text: str


class TextResponse(JsonResponse):
    """Reads an answer with the field `text`, which may be empty."""

    __slots__ = ()

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        return [decode_json(_text_decoder, data).text], COMPLETE


_text_decoder = msgspec.json.Decoder(_Text)
