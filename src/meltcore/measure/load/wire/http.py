"""Decodes HTTP/1.1 responses and server-sent events from received bytes, however they are split. Opens no sockets.

No HTTP library is used. At 10,000 streams the client's own cost limits what can be measured, and its delays would count
as the server's latency. benchmarks/client_cost.py measures the CPU time per streamed event here and in aiohttp.

Sources: RFC 9112 (message syntax), RFC 9110 (fields), WHATWG HTML 9.2 (event stream interpretation).
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Protocol

from meltcore.common.errors import MeltcoreError

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 4 * 1024
MAX_EVENT_BYTES = 16 * 2**20

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_HEADER_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\x00]*?)[ \t]*")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")
_CONTENT_LENGTH = re.compile(r"[0-9]{1,18}")

# Chunk-size lines that were validated before, at most the 65,000 of up to 4 digits: streams repeat them.
_chunk_size_cache: dict[bytes, int] = {}
_MAX_CACHED_DIGITS = 4


class HttpError(MeltcoreError):
    """Reports that the bytes of a response violate the protocol. The connection cannot be used further."""


class ResponseHandler(Protocol):
    """Declares the callbacks of one response: one head, any number of body parts, then one end or one failure.

    `now_s` is the arrival time of the bytes being decoded (`time.monotonic()`).
    """

    now_s: float

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """Receive the status and the header fields.

        Names are in lower case. Repeated fields are joined by ", ".
        """

    def on_body(self, data: bytes) -> None:
        """Receive the next bytes of the body, without transfer coding. `data` is never empty."""

    def on_end(self) -> None:
        """Handle the end of the body."""

    def on_failure(self, reason: str, detail: str) -> None:
        """Handle the failure of the response. It is called at most once, and never after `on_end`."""


class _State(Enum):
    HEAD = auto()
    BODY_BY_LENGTH = auto()
    BODY_UNTIL_CLOSE = auto()
    CHUNK_LINE = auto()
    CHUNK_DATA = auto()
    CHUNK_END = auto()
    TRAILERS = auto()
    DONE = auto()


class ResponseParser:
    """Decodes one response and calls its handler. A connection creates a new parser for each request.

    `is_reusable` is valid once the response is complete. It tells whether the connection may carry another request.
    """

    __slots__ = ("_handler", "_pending", "_remaining", "_state", "is_reusable")

    def __init__(self, handler: ResponseHandler) -> None:
        self._handler = handler
        self._state = _State.HEAD
        self._pending = b""  # an unfinished line or head
        self._remaining = 0  # bytes left of the body or of the current chunk
        self.is_reusable = False

    @property
    def is_done(self) -> bool:
        """Return whether the response is complete."""
        return self._state is _State.DONE

    def feed(self, data: bytes) -> None:
        """Decode received bytes. Raises HttpError for malformed bytes and for bytes after the end of the response."""
        if self._pending:
            data = self._pending + data
            self._pending = b""
        elif self._state is _State.CHUNK_LINE:
            # Fast path for exactly one complete chunk, as nearly every streamed event arrives: saves 2 us per event.
            end = data.find(b"\r\n", 0, _MAX_CACHED_DIGITS + 2)
            length = _chunk_size_cache.get(data[:end])
            if length is not None and len(data) == end + 4 + length and data.endswith(b"\r\n"):
                self._handler.on_body(data[end + 2 : -2])
                return
        offset, num_bytes = 0, len(data)
        while offset < num_bytes:
            state = self._state
            if state is _State.CHUNK_LINE:
                offset = self._parse_chunk_line(data, offset)
            elif state is _State.CHUNK_DATA:
                offset = self._parse_sized_body(data, offset, _State.CHUNK_END)
            elif state is _State.CHUNK_END:
                offset = self._parse_chunk_end(data, offset)
            elif state is _State.BODY_BY_LENGTH:
                offset = self._parse_sized_body(data, offset, _State.DONE)
                if self._state is _State.DONE:
                    self._handler.on_end()
            elif state is _State.HEAD:
                offset = self._parse_head(data, offset)
            elif state is _State.TRAILERS:
                offset = self._parse_trailer(data, offset)
            elif state is _State.BODY_UNTIL_CLOSE:
                self._handler.on_body(data[offset:])
                return
            else:
                raise HttpError(f"{num_bytes - offset} bytes after the end of the response: {data[offset:][:40]!r}")
            if offset < 0:  # the rest waits in _pending for more
                return

    def feed_eof(self) -> None:
        """Handle the end of the connection. Raises HttpError if the response is incomplete."""
        if self._state is _State.BODY_UNTIL_CLOSE:
            self._state = _State.DONE
            self._handler.on_end()
        elif self._state is not _State.DONE:
            state_text = (
                "before a response" if self._state is _State.HEAD and not self._pending else "inside a response"
            )
            raise HttpError(f"connection closed {state_text}")

    def _wait_for_more(self, data: bytes, offset: int, limit: int, name: str) -> int:
        if len(data) - offset > limit:
            raise HttpError(f"{name} is longer than {limit} bytes")
        self._pending = data[offset:]
        return -1

    def _parse_chunk_line(self, data: bytes, offset: int) -> int:
        end = data.find(b"\r\n", offset)
        if end < 0:
            return self._wait_for_more(data, offset, MAX_CHUNK_LINE_BYTES, "a chunk-size line")
        match = _CHUNK_LINE.fullmatch(data, offset, end)
        if match is None:
            raise HttpError(f"bad chunk size: {data[offset:end][:40]!r}")
        self._remaining = int(match[1], 16)
        self._state = _State.CHUNK_DATA if self._remaining else _State.TRAILERS
        if self._remaining and len(match[1]) == end - offset <= _MAX_CACHED_DIGITS:
            _chunk_size_cache[match[1]] = self._remaining
        return end + 2

    def _parse_sized_body(self, data: bytes, offset: int, next_state: _State) -> int:
        part = data[offset : offset + self._remaining]
        self._remaining -= len(part)
        if not self._remaining:
            self._state = next_state
        self._handler.on_body(part)
        return offset + len(part)

    def _parse_chunk_end(self, data: bytes, offset: int) -> int:
        if len(data) - offset < 2:
            return self._wait_for_more(data, offset, 2, "a chunk's end")
        if data[offset : offset + 2] != b"\r\n":
            raise HttpError(f"a chunk runs past its size: {data[offset : offset + 20]!r}")
        self._state = _State.CHUNK_LINE
        return offset + 2

    def _parse_trailer(self, data: bytes, offset: int) -> int:
        end = data.find(b"\r\n", offset)
        if end < 0:
            return self._wait_for_more(data, offset, MAX_HEAD_BYTES, "a trailer")
        if end == offset:
            self._finish()
        elif _HEADER_FIELD.fullmatch(data, offset, end) is None:
            raise HttpError(f"bad trailer: {data[offset:end][:60]!r}")
        return end + 2

    def _finish(self) -> None:
        self._state = _State.DONE
        self._handler.on_end()

    def _parse_head(self, data: bytes, offset: int) -> int:
        end = data.find(b"\r\n\r\n", offset)
        if end < 0:
            if not _may_start_status_line(data[offset : offset + 9]):
                raise HttpError(f"not an HTTP/1.1 response: {data[offset:][:40]!r}")
            return self._wait_for_more(data, offset, MAX_HEAD_BYTES, "the response head")
        lines = data[offset:end].split(b"\r\n")
        match = _STATUS_LINE.fullmatch(lines[0])
        if match is None:
            raise HttpError(f"bad status line: {lines[0][:60]!r}")
        status = int(match[2])
        headers = _parse_fields(lines[1:])
        if status == 101:
            raise HttpError("status 101: the server switched protocols without being asked")
        if status >= 200:  # 1xx are interim: the real head follows
            self._begin_body(status, headers, keep_alive_by_default=match[1] == b"1")
        return end + 4

    def _begin_body(self, status: int, headers: dict[str, str], *, keep_alive_by_default: bool) -> None:
        connection_options = {
            connection_option.strip().lower() for connection_option in headers.get("connection", "").split(",")
        }
        self.is_reusable = "keep-alive" in connection_options or (
            keep_alive_by_default and "close" not in connection_options
        )
        content_encoding = headers.get("content-encoding", "identity").lower()
        if content_encoding != "identity":
            raise HttpError(f"content-encoding {content_encoding} was not asked for")
        transfer_encoding = headers.get("transfer-encoding")
        if transfer_encoding is not None and transfer_encoding.lower() != "chunked":
            raise HttpError(f"transfer-encoding {transfer_encoding} is not supported")
        content_length = None if transfer_encoding is not None else _content_length(headers)
        self._handler.on_head(status, headers)
        if status in (204, 304) or content_length == 0:
            self._finish()
        elif transfer_encoding is not None:
            self._state = _State.CHUNK_LINE
        elif content_length is not None:
            self._remaining = content_length
            self._state = _State.BODY_BY_LENGTH
        else:
            self.is_reusable = False
            self._state = _State.BODY_UNTIL_CLOSE


def _may_start_status_line(first_bytes: bytes) -> bool:
    prefix = b"HTTP/1."
    return first_bytes[: len(prefix)] == prefix[: len(first_bytes)]


def _parse_fields(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        match = _HEADER_FIELD.fullmatch(line)
        if match is None:
            raise HttpError(f"bad header line: {line[:60]!r}")
        name, value = match[1].decode("ascii").lower(), match[2].decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


def _content_length(headers: dict[str, str]) -> int | None:
    if "content-length" not in headers:
        return None
    values = {value.strip() for value in headers["content-length"].split(",")}
    value = values.pop()
    if values or _CONTENT_LENGTH.fullmatch(value) is None:
        raise HttpError(f"bad content-length: {headers['content-length'][:60]}")
    return int(value)


class ErrorEvent(bytes):
    """The data of a server-sent event whose name is `error`."""

    __slots__ = ()


class NamedEvent(bytes):
    """The data of a server-sent event whose name is neither `message` nor `error`, such as `ping`."""

    __slots__ = ()


_EVENT_KINDS: dict[bytes, type[bytes]] = {b"": bytes, b"message": bytes, b"error": ErrorEvent}


class EventParser:
    """Decodes the data of server-sent events from body bytes, however they are split.

    Ids and comments are ignored. The name of an event decides the type of its data.
    """

    __slots__ = ("_at_event_boundary", "_bom_checked", "_data_lines", "_kind", "_skip_next_lf", "_unfinished_line")

    def __init__(self) -> None:
        self._unfinished_line = b""  # an unfinished line
        self._data_lines: list[bytes] = []  # data lines of an unfinished event
        self._kind: type[bytes] = bytes  # of the data of the unfinished event, by its name
        self._skip_next_lf = False  # the last byte was a CR: an LF directly after it ends the same line
        self._bom_checked = False
        self._at_event_boundary = True  # events: nothing is buffered, and nothing is to be skipped

    @property
    def inside_event(self) -> bool:
        """Return whether an unfinished event is buffered, which means that no blank line has ended it yet."""
        return bool(self._unfinished_line or self._data_lines)

    @property
    def unfinished(self) -> bytes:
        """Return the data of an unfinished event, or its unfinished line if no line is complete."""
        return b"\n".join([*self._data_lines, *filter(None, [self._unfinished_line])])

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that end in `data`. Raises HttpError for an event above MAX_EVENT_BYTES."""
        if (
            self._at_event_boundary
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and b"\r" not in data
        ):  # fast path for exactly one complete event, the form of nearly all traffic
            self._bom_checked = True
            return [data[6:-2]]
        return self._feed_lines(data)

    def _feed_lines(self, data: bytes) -> list[bytes]:
        if self._skip_next_lf and data[:1] == b"\n":
            data = data[1:]
        self._skip_next_lf = data[-1:] == b"\r" if data else False
        data = self._unfinished_line + data
        if not self._bom_checked and len(data) >= 3:
            self._bom_checked = True
            data = data.removeprefix(b"\xef\xbb\xbf")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._unfinished_line = data.split(b"\n")
        if len(self._unfinished_line) > MAX_EVENT_BYTES:
            raise HttpError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data_lines.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._data_lines.append(b"")
            elif line.startswith(b"event:"):
                self._kind = _EVENT_KINDS.get(line[6:].strip(), NamedEvent)
            elif not line:
                if self._data_lines:
                    events.append(self._kind(b"\n".join(self._data_lines)))
                    self._data_lines.clear()
                self._kind = bytes
        self._at_event_boundary = not (
            self._unfinished_line or self._data_lines or self._kind is not bytes or self._skip_next_lf
        )
        return events
