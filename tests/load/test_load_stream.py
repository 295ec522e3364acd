"""What counts as text, as a whole answer, and as which failure."""

import json

import pytest

from meltcore.load.record import Record
from meltcore.load.stream import StreamExchange, WholeExchange, error_message


def event(text: str | None = None, *, finish: str | None = None, usage: int | None = None, role: bool = False) -> bytes:
    delta = {"role": "assistant", "content": ""} if role else {} if text is None else {"content": text}
    body: dict[str, object] = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": 5, "completion_tokens": usage}
    return f"data: {json.dumps(body)}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"


def play(
    *parts: tuple[float, bytes],
    status: int = 200,
    content_type: str = "text/event-stream",
    kind: type[StreamExchange] = StreamExchange,
    may_be_empty: bool = False,
) -> StreamExchange:
    """Feed `parts` at their times, then end the response."""
    ended: list[StreamExchange] = []
    exchange = kind(Record(index=0, intended_s=1.0), ended.append, keep_text=True, may_be_empty=may_be_empty)
    exchange.now_s = 1.5
    exchange.on_head(status, {"content-type": content_type})
    for now_s, data in parts:
        exchange.now_s = now_s
        exchange.on_body(data)
    exchange.on_end()
    assert ended == [exchange], "an exchange ends exactly once"
    return exchange


def test_a_whole_answer_has_its_times_counts_and_text() -> None:
    exchange = play(
        (2.0, event(role=True, usage=0)),
        (3.0, event("one", usage=1)),
        (4.0, event(" two", usage=2)),
        (5.0, event(finish="stop", usage=2) + USAGE + DONE),
    )
    record = exchange.record
    assert record.failure is None
    assert record.first_text_s == 3.0, "the role chunk carries no text"
    assert record.ended_s == 5.0
    assert record.times_s.tolist() == [3.0, 4.0]
    assert record.tokens_so_far is not None
    assert record.tokens_so_far.tolist() == [1, 2]
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (5, 2, "stop")
    assert exchange.answer == "one two"


def test_token_counts_on_only_some_chunks_are_not_used() -> None:
    exchange = play((3.0, event("one", usage=1)), (4.0, event("two")), (5.0, event(finish="stop") + USAGE + DONE))
    assert exchange.record.failure is None
    assert exchange.record.tokens_so_far is None


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (event("a") + USAGE + DONE, "truncated stream"),
        (event("a") + event(finish="stop") + USAGE, "truncated stream"),
        (event("a") + event(finish="stop") + USAGE + DONE + b"data: {", "truncated stream"),
        (event("a") + event(finish="stop") + DONE, "no usage"),
        (event(role=True) + event(finish="stop") + USAGE + DONE, "empty answer"),
        (event("a") + event(finish="abort") + USAGE + DONE, "aborted by server"),
        (event("a") + b"data: {nonsense}\n\n" + USAGE + DONE, "bad json"),
        (b'data: {"error": {"message": "engine gone"}}\n\n' + DONE, "error event"),
    ],
)
def test_less_than_a_whole_answer_is_a_failure_with_its_reason(stream: bytes, failure: str) -> None:
    assert play((2.0, stream)).record.failure == failure


ENDED_AT_ONCE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}\n\n' + DONE


def test_an_end_token_alone_is_an_answer_where_that_is_allowed() -> None:
    parts = (2.0, event(role=True, usage=0)), (3.0, event(finish="stop", usage=1) + ENDED_AT_ONCE)
    assert play(*parts).record.failure == "empty answer"
    exchange = play(*parts, may_be_empty=True)
    record = exchange.record
    assert (record.failure, exchange.answer, record.output_tokens, record.first_text_s) == (None, "", 1, 3.0)
    assert record.times_s.tolist() == [3.0]
    body = whole(
        choices=[{"message": {"content": ""}, "finish_reason": "stop"}],
        usage={"prompt_tokens": 5, "completion_tokens": 1},
    )
    not_streamed = play((2.0, body), content_type="application/json", kind=WholeExchange, may_be_empty=True)
    assert (not_streamed.record.failure, not_streamed.record.times_s.tolist()) == (None, [2.0])


@pytest.mark.parametrize(
    "stream",
    [
        event(finish="stop") + USAGE + DONE,  # two tokens of which nothing was seen
        event(finish="length") + ENDED_AT_ONCE,
        event(role=True) + ENDED_AT_ONCE,
    ],
)
def test_no_other_answer_may_be_empty(stream: bytes) -> None:
    assert play((2.0, stream), may_be_empty=True).record.failure in ("empty answer", "truncated stream")


def test_text_is_text_where_an_answer_may_be_empty() -> None:
    parts = (3.0, event("one", usage=1)), (4.0, event(finish="stop", usage=2) + USAGE + DONE)
    record = play(*parts, may_be_empty=True).record
    assert (record.failure, record.times_s.tolist(), record.output_tokens) == (None, [3.0], 2)


def thinks(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def test_thoughts_are_text_and_no_part_of_the_answer() -> None:
    both = thinks(reasoning_content=" 7 more", content="It is")
    streamed = play(
        (2.0, thinks(reasoning="12 and", reasoning_content="12 and")),
        (3.0, both),
        (4.0, event(" 19") + event(finish="stop") + USAGE + DONE),
    )
    message = {"reasoning": "12 and 7 more", "content": "It is 19"}
    body = whole(choices=[{"message": message, "finish_reason": "stop"}])
    not_streamed = play((2.0, body), content_type="application/json", kind=WholeExchange)
    assert streamed.record.times_s.tolist() == [2.0, 3.0, 4.0]
    for exchange in (streamed, not_streamed):
        assert (exchange.record.failure, exchange.thoughts, exchange.answer) == (None, "12 and 7 more", "It is 19")


def test_an_error_status_keeps_the_servers_message() -> None:
    body = b'{"error": {"message": "queue full: 16384 of 16384", "type": "x", "code": 429}}'
    record = play((2.0, body[:20]), (2.1, body[20:]), status=429, content_type="application/json").record
    assert (record.failure, record.detail) == ("http 429", "queue full: 16384 of 16384")


def test_an_answer_that_is_no_stream_fails_once() -> None:
    assert play((2.0, b"{}"), content_type="application/json").record.failure == "not a stream"


def whole(**changes: object) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "one two"}, "finish_reason": "stop"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}} | changes
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


def test_an_answer_not_streamed_is_one_chunk_at_its_end() -> None:
    body = whole()
    exchange = play((2.0, body[:30]), (3.0, body[30:]), content_type="application/json", kind=WholeExchange)
    record = exchange.record
    assert (record.failure, exchange.answer, record.ended_s) == (None, "one two", 3.0)
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (5, 2, "stop")
    assert record.times_s.tolist() == [3.0]
    text = whole(choices=[{"index": 0, "text": "plain", "finish_reason": "length"}])
    assert play((2.0, text), content_type="application/json", kind=WholeExchange).answer == "plain"


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (whole()[:-9], "bad json"),
        (whole(usage=None), "no usage"),
        (whole(choices=[{"message": {"content": ""}, "finish_reason": "stop"}]), "empty answer"),
        (whole(choices=[{"message": {"content": "a"}}]), "truncated stream"),
        (b"", "bad json"),
    ],
)
def test_less_than_a_whole_json_answer_is_a_failure_too(body: bytes, failure: str) -> None:
    assert play((2.0, body), content_type="application/json", kind=WholeExchange).record.failure == failure


def test_a_stream_that_was_not_asked_for_is_a_failure() -> None:
    assert play((2.0, event("a")), kind=WholeExchange).record.failure == "not JSON"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": "plain"}', "plain"),
        ('{"message": "top level"}', "top level"),
        ("<html>oops", "<html>oops"),
        ("", "empty body"),
    ],
)
def test_error_messages_of_other_forms_are_found(body: str, message: str) -> None:
    assert error_message(body) == message
