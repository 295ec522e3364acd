"""Reads an answer that is one JSON document into a record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.wire.response import BadJsonError, BaseResponse, decode_json, whole_text

MAX_JSON_BYTES = 16 * 2**20  # a transcript of three hours has 0.2 MB

Failure = tuple[str | None, str | None]
COMPLETE: Failure = (None, None)


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
        """Read into `record`. `max_output_tokens` has no effect on answers without output tokens."""
        del max_output_tokens
        super().__init__(record, on_done)
        self._keep_text = keep_text
        self._parts: list[bytes] = []
        self._num_bytes = 0
        self._content = ""
        record.saw_usage = False

    @property
    def content(self) -> str:
        """Return the text of the answer if `keep_text` was set."""
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
        """Return the texts of the answer and its failure. Raises BadJsonError if the document has another form."""
        raise NotImplementedError


class _Text(msgspec.Struct):
    text: str


class TextResponse(JsonResponse):
    """Reads an answer with the field `text`, which may be empty."""

    __slots__ = ()

    def _read(self, data: bytes) -> tuple[list[str], Failure]:
        return [decode_json(_text_decoder, data).text], COMPLETE


_text_decoder = msgspec.json.Decoder(_Text)
