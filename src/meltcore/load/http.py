"""HTTP/1.1 responses and server-sent events, decoded from bytes in any split. No sockets here.

Why not a library: at 10,000 streams the client's own cost decides what can be measured, and its lateness would be
booked on the server. benchmarks/client_cost.py measures what a streamed event costs here and in aiohttp.

Sources: RFC 9112 (message syntax), RFC 9110 (fields), WHATWG HTML 9.2 (event stream interpretation).
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Protocol

from meltcore.errors import MeltcoreError

MAX_HEAD_BYTES = 64 * 1024
MAX_CHUNK_LINE_BYTES = 4 * 1024
MAX_EVENT_BYTES = 16 * 2**20

_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9]\d\d)(?: [^\r\n]*)?")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\x00]*?)[ \t]*")
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n]*)?")
_LENGTH = re.compile(r"\d{1,18}")

# Chunk-size lines that have been checked and read before, at most the 65,000 of up to 4 digits: streams repeat them.
_known_sizes: dict[bytes, int] = {}
_CACHED_DIGITS = 4


class HttpError(MeltcoreError):
    """The bytes of a response break the protocol; the connection cannot be used further."""


class ResponseSink(Protocol):
    """Who receives a response as it is decoded, in this order: one head, any number of bodies, one end."""

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        """`headers` has lower-case names; repeated fields are joined by ", "."""

    def on_body(self, data: bytes) -> None:
        """The next bytes of the body, transfer coding removed. Never empty."""

    def on_end(self) -> None:
        """The body is whole."""


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
    """Decodes one response into `sink`; a connection makes a new parser for its next request.

    `reusable` says, once done, whether the connection may carry another request.
    """

    __slots__ = ("_pending", "_remaining", "_sink", "_state", "reusable")

    def __init__(self, sink: ResponseSink) -> None:
        self._sink = sink
        self._state = _State.HEAD
        self._pending = b""  # an unfinished line or head
        self._remaining = 0  # bytes left of the body or of the present chunk
        self.reusable = False

    @property
    def done(self) -> bool:
        return self._state is _State.DONE

    def feed(self, data: bytes) -> None:
        """Decode what arrived. Raises HttpError on anything malformed, and on bytes after the response's end."""
        if self._pending:
            data = self._pending + data
            self._pending = b""
        elif self._state is _State.CHUNK_LINE:
            # One whole chunk and nothing else: how nearly every streamed event arrives, worth 2 us each.
            end = data.find(b"\r\n", 0, _CACHED_DIGITS + 2)
            length = _known_sizes.get(data[:end])
            if length is not None and len(data) == end + 4 + length and data.endswith(b"\r\n"):
                self._sink.on_body(data[end + 2 : -2])
                return
        position, size = 0, len(data)
        while position < size:
            state = self._state
            if state is _State.CHUNK_LINE:
                position = self._chunk_line(data, position)
            elif state is _State.CHUNK_DATA:
                position = self._counted(data, position, _State.CHUNK_END)
            elif state is _State.CHUNK_END:
                position = self._chunk_end(data, position)
            elif state is _State.BODY_BY_LENGTH:
                position = self._counted(data, position, _State.DONE)
                if self._state is _State.DONE:
                    self._sink.on_end()
            elif state is _State.HEAD:
                position = self._head(data, position)
            elif state is _State.TRAILERS:
                position = self._trailer(data, position)
            elif state is _State.BODY_UNTIL_CLOSE:
                self._sink.on_body(data[position:])
                return
            else:
                raise HttpError(f"{size - position} bytes after the end of the response: {data[position:][:40]!r}")
            if position < 0:  # the rest waits in _pending for more
                return

    def feed_eof(self) -> None:
        """The peer closed. Raises HttpError unless the response is whole."""
        if self._state is _State.BODY_UNTIL_CLOSE:
            self._state = _State.DONE
            self._sink.on_end()
        elif self._state is not _State.DONE:
            where = "before a response" if self._state is _State.HEAD and not self._pending else "inside a response"
            raise HttpError(f"connection closed {where}")

    def _wait_for_more(self, data: bytes, position: int, limit: int, what: str) -> int:
        if len(data) - position > limit:
            raise HttpError(f"{what} is longer than {limit} bytes")
        self._pending = data[position:]
        return -1

    def _chunk_line(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n", position)
        if end < 0:
            return self._wait_for_more(data, position, MAX_CHUNK_LINE_BYTES, "a chunk-size line")
        match = _CHUNK_LINE.fullmatch(data, position, end)
        if match is None:
            raise HttpError(f"bad chunk size: {data[position:end][:40]!r}")
        self._remaining = int(match[1], 16)
        self._state = _State.CHUNK_DATA if self._remaining else _State.TRAILERS
        if self._remaining and len(match[1]) == end - position <= _CACHED_DIGITS:
            _known_sizes[match[1]] = self._remaining
        return end + 2

    def _counted(self, data: bytes, position: int, after: _State) -> int:
        part = data[position : position + self._remaining]
        self._remaining -= len(part)
        if not self._remaining:
            self._state = after
        self._sink.on_body(part)
        return position + len(part)

    def _chunk_end(self, data: bytes, position: int) -> int:
        if len(data) - position < 2:
            return self._wait_for_more(data, position, 2, "a chunk's end")
        if data[position : position + 2] != b"\r\n":
            raise HttpError(f"a chunk runs past its size: {data[position : position + 20]!r}")
        self._state = _State.CHUNK_LINE
        return position + 2

    def _trailer(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n", position)
        if end < 0:
            return self._wait_for_more(data, position, MAX_HEAD_BYTES, "a trailer")
        if end == position:
            self._finish()
        elif _FIELD.fullmatch(data, position, end) is None:
            raise HttpError(f"bad trailer: {data[position:end][:60]!r}")
        return end + 2

    def _finish(self) -> None:
        self._state = _State.DONE
        self._sink.on_end()

    def _head(self, data: bytes, position: int) -> int:
        end = data.find(b"\r\n\r\n", position)
        if end < 0:
            if not _may_start_status_line(data[position : position + 9]):
                raise HttpError(f"not an HTTP/1.1 response: {data[position:][:40]!r}")
            return self._wait_for_more(data, position, MAX_HEAD_BYTES, "the response head")
        lines = data[position:end].split(b"\r\n")
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
        connection = {option.strip().lower() for option in headers.get("connection", "").split(",")}
        self.reusable = "keep-alive" in connection or (keep_alive_by_default and "close" not in connection)
        encoding = headers.get("content-encoding", "identity").lower()
        if encoding != "identity":
            raise HttpError(f"content-encoding {encoding} was not asked for")
        transfer = headers.get("transfer-encoding")
        if transfer is not None and transfer.lower() != "chunked":
            raise HttpError(f"transfer-encoding {transfer} is not supported")
        length = None if transfer is not None else _content_length(headers)
        self._sink.on_head(status, headers)
        if status in (204, 304) or length == 0:
            self._finish()
        elif transfer is not None:
            self._state = _State.CHUNK_LINE
        elif length is not None:
            self._remaining = length
            self._state = _State.BODY_BY_LENGTH
        else:
            self.reusable = False
            self._state = _State.BODY_UNTIL_CLOSE


def _may_start_status_line(start: bytes) -> bool:
    prefix = b"HTTP/1."
    return start[: len(prefix)] == prefix[: len(start)]


def _parse_fields(lines: list[bytes]) -> dict[str, str]:
    headers: dict[str, str] = {}
    for line in lines:
        match = _FIELD.fullmatch(line)
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
    if values or _LENGTH.fullmatch(value) is None:
        raise HttpError(f"bad content-length: {headers['content-length'][:60]}")
    return int(value)


class EventParser:
    """Data of server-sent events, from body bytes in any split. Event names, ids and comments are passed over."""

    __slots__ = ("_between", "_lines", "_skip_newline", "_started", "_tail")

    def __init__(self) -> None:
        self._tail = b""  # an unfinished line
        self._lines: list[bytes] = []  # data lines of an unfinished event
        self._skip_newline = False  # the last byte was a CR: an LF right after it ends the same line
        self._started = False
        self._between = True  # events: nothing is held, and nothing is to be skipped

    @property
    def inside_event(self) -> bool:
        """Whether bytes of an event are held that no blank line has ended yet."""
        return bool(self._tail or self._lines)

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes. Raises HttpError where one is longer than MAX_EVENT_BYTES."""
        if (
            self._between
            and data.startswith(b"data: ")
            and data.endswith(b"\n\n")
            and data.find(b"\n") == len(data) - 2
            and b"\r" not in data
        ):  # one whole event, the shape of nearly all traffic
            self._started = True
            return [data[6:-2]]
        return self._feed_lines(data)

    def _feed_lines(self, data: bytes) -> list[bytes]:
        if self._skip_newline and data[:1] == b"\n":
            data = data[1:]
        self._skip_newline = data[-1:] == b"\r" if data else False
        data = self._tail + data
        if not self._started and len(data) >= 3:
            self._started = True
            data = data.removeprefix(b"\xef\xbb\xbf")
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._tail = data.split(b"\n")
        if len(self._tail) > MAX_EVENT_BYTES:
            raise HttpError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._lines.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line == b"data":
                self._lines.append(b"")
            elif not line and self._lines:
                events.append(b"\n".join(self._lines))
                self._lines.clear()
        self._between = not (self._tail or self._lines or self._skip_newline)
        return events
