"""Answers whose JSON is unusual or broken: what is read of it, and that every failure has its reason."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from meltcore.measure.load.record import RequestRecord, TaskWork
from meltcore.measure.load.tasks.translation import TranslationResponse
from meltcore.measure.load.wire.response import BaseResponse, TextResponse, error_message, whole_text
from meltcore.measure.load.wire.stream import StreamedResponse, UnstreamedResponse

STREAM, JSON = "text/event-stream", "application/json"
END = b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"


def play(kind: Any, body: bytes) -> BaseResponse:
    """Feed a whole answer to its reader. Its record can be written to a file and sent to another process."""
    ended: list[BaseResponse] = []
    record = RequestRecord(index=0, intended_s=1.0, work=TaskWork(sentences=1))
    response: BaseResponse = kind(record, ended.append, keep_text=True)
    response.now_s = 2.0
    response.on_head(200, {"content-type": STREAM if kind is StreamedResponse else JSON})
    response.on_body(body)
    response.on_end()
    assert ended == [response]
    assert msgspec.msgpack.encode(record)
    for text in (response.content, response.reasoning, msgspec.json.encode(record).decode()):
        assert text.encode().decode() == text
    return response


def event(content: bytes, name: bytes = b"content") -> bytes:
    return b'data: {"choices": [{"delta": {"%s": "%s"}}]}\n\n' % (name, content)


def documents(text: bytes) -> list[tuple[Any, bytes]]:
    """Answers of every kind whose text is `text`, in the bytes of JSON."""
    return [
        (StreamedResponse, event(text) + END + DONE),
        (UnstreamedResponse, b'{"choices": [{"message": {"content": "%s"}, "finish_reason": "stop"}]}' % text),
        (TextResponse, b'{"text": "%s"}' % text),
        (TranslationResponse, b'{"translations": ["%s"]}' % text),
    ]


BROKEN = [b"\xf0\x9f", b"a\xe0\xa4", b"\xff", b"\\ud83d\xff", b'", "x": ' + b'{"a":' * 50_000]


@pytest.mark.parametrize("text", BROKEN, ids=["cut", "cut after a letter", "no UTF-8", "half a pair too", "deep"])
@pytest.mark.parametrize("kind", range(4))
def test_broken_json_is_a_failure_that_shows_it(text: bytes, kind: int) -> None:
    reader, body = documents(text)[kind]
    record = play(reader, body).record
    assert record.failure == "bad json"
    assert record.detail is not None
    assert '{"' in record.detail


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b"\\ud83d", "\ufffd"),
        (b"a\\uDE00b", "a\ufffdb"),
        (b"\\ud83d\\ude00", "😀"),
        (b"\\ude00\\ud83d", "\ufffd\ufffd"),
    ],
)
@pytest.mark.parametrize("kind", range(4))
def test_half_a_surrogate_pair_is_a_text(text: bytes, read: str, kind: int) -> None:
    reader, body = documents(text)[kind]
    response = play(reader, body)
    assert (response.record.failure, response.content) == (None, read)


@pytest.mark.parametrize("name", [b"content", b"reasoning"])
def test_halves_of_a_pair_in_two_events_are_joined(name: bytes) -> None:
    body = event(b"\\ud83d", name) + event(b"\\ude00 ", name) + event(b"\\uD83C", name) + event(b"\\uDF0A", name)
    response = play(StreamedResponse, body + END + DONE)
    text = response.content if name == b"content" else response.reasoning
    assert (text, response.record.output_tokens) == ("😀 🌊", 4)


def test_halves_elsewhere_reach_no_file() -> None:
    stop = b'data: {"choices": [{"delta": {}, "finish_reason": "st\\ud83d"}]}\n\n'
    assert play(StreamedResponse, event(b"a") + stop + DONE).record.finish_reason == "st\ufffd"
    told = b'data: {"error": {"message": "gone \\ude00"}}\n\n'
    assert play(StreamedResponse, told).record.detail == "gone \ufffd"


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "\ud83d", "1" * 5000])
def test_fallback_reads_only_what_json_allows(value: str) -> None:
    text = json.dumps(value) if value == "\ud83d" else value
    body = b'data: {"choices": [{"delta": {"content": "\\ud83d"}}], "usage": ' + text.encode() + b"}\n\n"
    assert play(StreamedResponse, body + END + DONE).record.failure == "bad json"


@pytest.mark.parametrize("text", ["", "plain", "हिन्दी 😀", "\ufffd"])
def test_whole_text_stays(text: str) -> None:
    assert whole_text(text) is text


def usage(**counts: object) -> bytes:
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


@pytest.mark.parametrize(
    ("cached", "read", "failure"),
    [(0.0, 0, None), (4.0, 4, None), (1.5, -1, "implausible usage"), (11.0, 11, "implausible usage")],
)
def test_counts_in_details_may_be_floats(cached: float, read: int, failure: str | None) -> None:
    details = {"cached_tokens": cached, "audio_tokens": 0.0}
    counts = usage(prompt_tokens=10.0, completion_tokens=1.0, prompt_tokens_details=details)
    record = play(StreamedResponse, event(b"a") + END + counts + DONE).record
    assert (record.failure, record.cached_tokens) == (failure, read)


@pytest.mark.parametrize("count", [1e300, 10**30, -(10**30)])
def test_count_of_any_size_reaches_the_parent_process(count: float) -> None:
    stream = event(b"a") + END + usage(prompt_tokens=count, completion_tokens=1) + DONE
    assert play(StreamedResponse, stream).record.failure == "implausible usage"
    cached = {"cached_tokens": count}
    stream = event(b"a") + END + usage(prompt_tokens=1, completion_tokens=1, prompt_tokens_details=cached) + DONE
    assert play(StreamedResponse, stream).record.failure == "implausible usage"


@pytest.mark.parametrize(("tokens", "failure"), [(7.0, None), (7, None), (0.5, "implausible usage")])
def test_counts_of_translations_may_be_floats(tokens: float, failure: str | None) -> None:
    body = json.dumps({"translations": ["a"], "usage": {"prompt_tokens": tokens}}).encode()
    record = play(TranslationResponse, body).record
    assert (record.failure, record.prompt_tokens) == (failure, 7 if failure is None else -1)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"detail": "internal", "status_code": 500}, "internal"),
        ({"detail": [{"loc": ["body"], "msg": "too long"}]}, "too long"),
        ({"detail": {"code": 3, "msg": "no memory"}}, "no memory"),
        ({"type": "error", "message": "gone"}, "gone"),
    ],
)
@pytest.mark.parametrize("parts", [0, 1])
def test_error_in_fastapis_form_is_the_failures_detail(told: dict[str, Any], message: str, parts: int) -> None:
    data = json.dumps(told).encode()
    record = play(StreamedResponse, event(b"a") * parts + b"data: " + data + b"\n\n").record
    assert record.failure == "error event"
    assert message in (record.detail or "")
    assert play(UnstreamedResponse, data).record.failure == "error event"


@pytest.mark.parametrize(
    "told",
    [b'data: {"detail": ""}\n\n', b'event: cost\ndata: {"detail": "0.1 USD"}\n\n', b'data: {"detail": null}\n\n'],
)
def test_other_details_are_no_error(told: bytes) -> None:
    answer = event(b"a").replace(b'{"choices"', b'{"detail": "high", "choices"')
    response = play(StreamedResponse, told + answer + END + DONE + b'data: {"detail": "done"}\n\n')
    assert (response.record.failure, response.content) == (None, "a")


@pytest.mark.parametrize("body", ['{"error": "\ufffd"}', '{"error": ' + '{"a":' * 50_000])
def test_message_of_a_broken_error_is_shown(body: str) -> None:
    assert error_message(body) in (body, body[:300], "\ufffd")
