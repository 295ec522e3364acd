"""Responses and event streams are decoded complete, in any split of bytes, and malformed."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.measure.load.wire.http import MAX_HEAD_BYTES, EventParser, HttpError, ResponseParser


class Collected:
    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.ends = 0

    def on_head(self, status: int, headers: dict[str, str]) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        assert data
        assert not self.ends
        self.body += data

    def on_end(self) -> None:
        self.ends += 1


def parse(*parts: bytes, eof: bool = False) -> tuple[Collected, ResponseParser]:
    sink = Collected()
    parser = ResponseParser(sink)
    for part in parts:
        parser.feed(part)
    if eof:
        parser.feed_eof()
    return sink, parser


def split_at(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges) if high > low]


CHUNKED = (
    b"HTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\nx-a: 2\r\n\r\n"
    b"5\r\nhello\r\n0c;n=v\r\n, wide world\r\n10  \r\n0123456789abcdef\r\n0\r\nX-Trailer: yes\r\n\r\n"
)
COUNTED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 11\r\nConnection: keep-alive\r\n\r\nhello world"


@given(st.lists(st.integers(0, 10_000), max_size=60))
def test_chunked_response_decodes_the_same_in_any_split(cuts: list[int]) -> None:
    sink, parser = parse(*split_at(CHUNKED, cuts))
    assert (sink.status, sink.body, sink.ends) == (200, b"hello, wide world0123456789abcdef", 1)
    assert sink.headers["x-a"] == "1, 2"
    assert parser.is_done
    assert parser.is_reusable


@given(st.lists(st.integers(0, 10_000), max_size=30))
def test_counted_response_decodes_the_same_in_any_split(cuts: list[int]) -> None:
    sink, parser = parse(*split_at(COUNTED, cuts))
    assert (sink.status, sink.body, sink.ends) == (429, b"hello world", 1)
    assert parser.is_reusable


def test_body_without_length_ends_with_the_connection_and_is_not_reusable() -> None:
    sink, parser = parse(b"HTTP/1.1 200 OK\r\n\r\nabc", b"def", eof=True)
    assert (sink.body, sink.ends, parser.is_reusable) == (b"abcdef", 1, False)


@pytest.mark.parametrize(
    ("head", "reusable"),
    [
        (b"HTTP/1.1 200 OK\r\nConnection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n", True),
        (b"HTTP/1.1 204\r\n", True),
    ],
)
def test_connection_is_reused_only_where_both_sides_allow_it(head: bytes, reusable: bool) -> None:
    sink, parser = parse(head + b"Content-Length: 0\r\n\r\n")
    assert sink.ends == 1
    assert parser.is_reusable is reusable


@pytest.mark.parametrize("cut", [10, 25, -20, -8, -1])
def test_connection_closed_inside_a_response_is_an_error(cut: int) -> None:
    with pytest.raises(HttpError, match="closed inside"):
        parse(CHUNKED[25:][:cut], eof=True)


HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n", "not an HTTP/1.1 response"),
        (b"HTTP/2 200\r\n\r\n", "bad status line"),
        (b"HTTP/1.1 20 OK\r\n\r\n", "bad status line"),
        (b"HTTP/1.1 101 Switching\r\n\r\n", "switched protocols"),
        (HEAD + b"Bad Header\r\n\r\n", "bad header line"),
        (HEAD + b"A: 1\r\n folded\r\n\r\n", "bad header line"),
        (HEAD + b"Content-Length: -1\r\n\r\n", "bad content-length"),
        (HEAD + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "bad content-length"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "transfer-encoding"),
        (HEAD + b"Content-Encoding: gzip\r\n\r\n", "content-encoding"),
        (HEAD + b"X: " + b"a" * MAX_HEAD_BYTES, "longer than"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n+5\r\n", "bad chunk size"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x5\r\n", "bad chunk size"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n", "past its size"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nbad trailer\r\n", "bad trailer"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 5000, "longer than"),
        (HEAD + b"Content-Length: 2\r\n\r\nabc", "after the end"),
    ],
)
def test_malformed_bytes_are_an_error_with_its_reason(data: bytes, message: str) -> None:
    with pytest.raises(HttpError, match=message):
        parse(data)


STREAM = (
    b"\xef\xbb\xbf: a comment\n\ndata: one\n\ndata:two\r\n\r\nevent: x\rid: 7\rdata: three\rdata:  lines\r\r"
    b"data\ndata: after empty\n\nretry: 3\n\ndata: [DONE]\n\n"
)
EVENTS = [b"one", b"two", b"three\n lines", b"\nafter empty", b"[DONE]"]


@given(st.lists(st.integers(0, 10_000), max_size=80))
def test_event_stream_gives_the_same_events_in_any_split(cuts: list[int]) -> None:
    parser = EventParser()
    events = [event for part in split_at(STREAM, cuts) for event in parser.feed(part)]
    assert events == EVENTS
    assert not parser.inside_event


@given(st.lists(st.binary(min_size=1).filter(lambda each: b"\n" not in each and b"\r" not in each)), st.data())
def test_any_payload_round_trips_through_events(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(b"data: " + payload + b"\n\n" for payload in payloads)
    parser = EventParser()
    cuts = data.draw(st.lists(st.integers(0, 10_000), max_size=20))
    assert [event for part in split_at(stream, cuts) for event in parser.feed(part)] == payloads


def test_event_without_its_blank_line_is_unfinished() -> None:
    parser = EventParser()
    assert parser.feed(b"data: half\n") == []
    assert parser.inside_event
