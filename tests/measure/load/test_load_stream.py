"""What counts as text, as a complete answer, and as which failure."""

import json

import pytest

from meltcore.measure.load.config import AnswerRules
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.wire.response import error_message
from meltcore.measure.load.wire.stream import MAX_TOKENS, NO_EXTRA_RULES, StreamedResponse, UnstreamedResponse


def event(text: str | None = None, *, finish: str | None = None, usage: int | None = None, role: bool = False) -> bytes:
    delta = {"role": "assistant", "content": ""} if role else {} if text is None else {"content": text}
    body: dict[str, object] = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        body["usage"] = {"prompt_tokens": 5, "completion_tokens": usage}
    return f"data: {json.dumps(body)}\n\n".encode()


USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}}\n\n'
NO_TOKENS = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 0}}\n\n'
DONE = b"data: [DONE]\n\n"


def play(
    *parts: tuple[float, bytes],
    status: int = 200,
    content_type: str = "text/event-stream",
    kind: type[StreamedResponse] = StreamedResponse,
    rules: AnswerRules = NO_EXTRA_RULES,
    max_output_tokens: int | None = None,
) -> StreamedResponse:
    """Feed `parts` at their times, then end the response."""
    ended: list[StreamedResponse] = []
    record = RequestRecord(index=0, intended_s=1.0)
    response = kind(record, ended.append, keep_text=True, rules=rules, max_output_tokens=max_output_tokens)
    response.now_s = 1.5
    response.on_head(status, {"content-type": content_type})
    for now_s, data in parts:
        response.now_s = now_s
        response.on_body(data)
    response.on_end()
    assert ended == [response], "an response ends exactly once"
    return response


def test_complete_answer_has_its_times_counts_and_text() -> None:
    response = play(
        (2.0, event(role=True, usage=0)),
        (3.0, event("one", usage=1)),
        (4.0, event(" two", usage=2)),
        (5.0, event(finish="stop", usage=2) + USAGE + DONE),
    )
    record = response.record
    assert record.failure is None
    assert record.first_text_s == 3.0, "the role chunk carries no text"
    assert record.ended_s == 5.0
    assert record.times_s.tolist() == [3.0, 4.0]
    assert record.cumulative_tokens is not None
    assert record.cumulative_tokens.tolist() == [1, 2]
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (5, 2, "stop")
    assert response.content == "one two"


def test_token_counts_of_only_some_events_are_not_used() -> None:
    response = play((3.0, event("one", usage=1)), (4.0, event("two")), (5.0, event(finish="stop") + USAGE + DONE))
    assert response.record.failure is None
    assert response.record.cumulative_tokens is None


@pytest.mark.parametrize(
    ("stream", "failure"),
    [
        (event("a") + USAGE + DONE, "truncated stream"),
        (event("a") + event(finish="stop") + USAGE + DONE + b"data: {", "truncated stream"),
        (event(role=True) + event(finish="stop") + DONE, "empty answer"),
        (event(role=True) + event(finish="stop") + NO_TOKENS + DONE, "empty answer"),
        (event("a") + event(finish="abort") + USAGE + DONE, "aborted by server"),
        (event("a") + b"data: {nonsense}\n\n" + USAGE + DONE, "bad json"),
        (b'data: {"error": {"message": "engine gone"}}\n\n' + DONE, "error event"),
    ],
)
def test_incomplete_answer_is_a_failure_with_its_reason(stream: bytes, failure: str) -> None:
    assert play((2.0, stream)).record.failure == failure


@pytest.mark.parametrize(
    ("stream", "saw_done", "saw_usage"),
    [
        (event("a") + event(" b") + event(finish="stop") + USAGE, False, True),
        (event("a") + event(" b") + event(finish="stop") + DONE, True, False),
        (event("a") + event(" b") + event(finish="stop"), False, False),
    ],
)
def test_stream_that_ends_in_order_after_finish_reason_is_complete(
    stream: bytes, saw_done: bool, saw_usage: bool
) -> None:
    record = play((2.0, stream)).record
    assert (record.failure, record.saw_done, record.saw_usage) == (None, saw_done, saw_usage)
    assert record.output_tokens == 2, "without usage each event that carried text counts"
    strict = play((2.0, stream), rules=AnswerRules(needs_usage=True)).record
    assert strict.failure == (None if saw_usage else "no usage")


def test_counted_tokens_without_text_are_complete_unless_text_is_needed() -> None:
    stream = event(role=True) + event("", usage=1) + event(finish="length") + USAGE + DONE
    record = play((2.0, stream)).record
    assert (record.failure, record.output_tokens, record.first_text_s) == (None, 2, 0.0)
    assert play((2.0, stream), rules=AnswerRules(needs_text=True)).record.failure == "empty answer"


STRICT = AnswerRules(needs_text=True, allow_empty=True)
ENDED_IMMEDIATELY = b'data: {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}\n\n' + DONE


def test_end_token_alone_is_complete_where_empty_answers_are_allowed() -> None:
    parts = (2.0, event(role=True, usage=0)), (3.0, event(finish="stop", usage=1) + ENDED_IMMEDIATELY)
    assert play(*parts, rules=AnswerRules(needs_text=True)).record.failure == "empty answer"
    response = play(*parts, rules=STRICT)
    record = response.record
    assert (record.failure, response.content, record.output_tokens, record.first_text_s) == (None, "", 1, 3.0)
    assert record.times_s.tolist() == [3.0]
    body = whole(
        choices=[{"message": {"content": ""}, "finish_reason": "stop"}],
        usage={"prompt_tokens": 5, "completion_tokens": 1},
    )
    not_streamed = play((2.0, body), content_type="application/json", kind=UnstreamedResponse, rules=STRICT)
    assert (not_streamed.record.failure, not_streamed.record.times_s.tolist()) == (None, [2.0])


@pytest.mark.parametrize(
    "stream",
    [
        event(finish="stop") + USAGE + DONE,  # two tokens of which nothing was seen
        event(finish="length") + ENDED_IMMEDIATELY,
        event(role=True) + ENDED_IMMEDIATELY,
    ],
)
def test_no_other_empty_answer_is_complete(stream: bytes) -> None:
    assert play((2.0, stream), rules=STRICT).record.failure in ("empty answer", "truncated stream")


def test_answer_with_text_is_unchanged_where_empty_answers_are_allowed() -> None:
    parts = (3.0, event("one", usage=1)), (4.0, event(finish="stop", usage=2) + USAGE + DONE)
    record = play(*parts, rules=STRICT).record
    assert (record.failure, record.times_s.tolist(), record.output_tokens) == (None, [3.0], 2)


def thinks(**delta: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"delta": delta}]}).encode() + b"\n\n"


def test_reasoning_is_text_but_not_content() -> None:
    both = thinks(reasoning_content=" 7 more", content="It is")
    streamed = play(
        (2.0, thinks(reasoning="12 and", reasoning_content="12 and")),
        (3.0, both),
        (4.0, event(" 19") + event(finish="stop") + USAGE + DONE),
    )
    message = {"reasoning": "12 and 7 more", "content": "It is 19"}
    body = whole(choices=[{"message": message, "finish_reason": "stop"}])
    not_streamed = play((2.0, body), content_type="application/json", kind=UnstreamedResponse)
    assert streamed.record.times_s.tolist() == [2.0, 3.0, 4.0]
    for response in (streamed, not_streamed):
        assert (response.record.failure, response.reasoning, response.content) == (None, "12 and 7 more", "It is 19")


def test_error_status_keeps_the_servers_message() -> None:
    body = b'{"error": {"message": "queue full: 16384 of 16384", "type": "x", "code": 429}}'
    record = play((2.0, body[:20]), (2.1, body[20:]), status=429, content_type="application/json").record
    assert (record.failure, record.detail) == ("http 429", "queue full: 16384 of 16384")


def test_response_of_another_content_type_fails_once() -> None:
    assert play((2.0, b"{}"), content_type="application/json").record.failure == "not a stream"


def whole(**changes: object) -> bytes:
    choice = {"index": 0, "message": {"role": "assistant", "content": "one two"}, "finish_reason": "stop"}
    body = {"choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 2}} | changes
    return json.dumps({name: value for name, value in body.items() if value is not None}).encode()


def test_unstreamed_answer_is_one_event_at_its_end() -> None:
    body = whole()
    response = play((2.0, body[:30]), (3.0, body[30:]), content_type="application/json", kind=UnstreamedResponse)
    record = response.record
    assert (record.failure, response.content, record.ended_s) == (None, "one two", 3.0)
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (5, 2, "stop")
    assert record.times_s.tolist() == [3.0]
    text = whole(choices=[{"index": 0, "text": "plain", "finish_reason": "length"}])
    assert play((2.0, text), content_type="application/json", kind=UnstreamedResponse).content == "plain"


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (whole()[:-9], "bad json"),
        (whole(usage=None, choices=[{"message": {"content": ""}, "finish_reason": "stop"}]), "empty answer"),
        (whole(choices=[{"message": {"content": "a"}}]), "truncated stream"),
        (b"", "bad json"),
    ],
)
def test_incomplete_unstreamed_answer_is_a_failure(body: bytes, failure: str) -> None:
    assert play((2.0, body), content_type="application/json", kind=UnstreamedResponse).record.failure == failure


def test_stream_instead_of_json_is_a_failure() -> None:
    assert play((2.0, event("a")), kind=UnstreamedResponse).record.failure == "not JSON"


def usage_event(prompt: int, completion: int, cached: int | None = None) -> bytes:
    usage: dict[str, object] = {"prompt_tokens": prompt, "completion_tokens": completion}
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode()


ALLOWS_3 = 3
WRONG_USAGE = [
    ((5, -6), "completion_tokens -6"),
    ((5, 4), "completion_tokens 4, the request allows at most 3"),
    ((5, 10**30), f"completion_tokens {10**30}, the request allows at most 3"),
    ((5, 0), "completion_tokens 0 for 1 events with text"),
    ((-5, 2), "prompt_tokens -5"),
    ((10**18, 2), f"prompt_tokens {10**18}, at most {MAX_TOKENS} are possible"),
    ((5, 2, 6), "cached_tokens 6 of prompt_tokens 5"),
    ((5, 2, -1), "cached_tokens -1"),
]


@pytest.mark.parametrize(("usage", "detail"), WRONG_USAGE)
def test_usage_that_cannot_be_true_fails_the_request_and_names_the_count(usage: tuple[int, ...], detail: str) -> None:
    stream = event("a") + event(finish="stop") + usage_event(*usage) + DONE
    streamed = play((2.0, stream), max_output_tokens=ALLOWS_3).record
    assert (streamed.failure, streamed.detail) == ("implausible usage", detail)
    fields = json.loads(usage_event(*usage)[6:])["usage"]
    body = whole(usage=fields)
    response = play((2.0, body), content_type="application/json", kind=UnstreamedResponse, max_output_tokens=ALLOWS_3)
    assert (response.record.failure, response.record.detail) == ("implausible usage", detail)


@pytest.mark.parametrize("count", [-6, 4, 10**18])
def test_wrong_token_count_of_an_event_with_text_fails_the_request(count: int) -> None:
    stream = event("a", usage=1) + event("b", usage=count) + event(finish="stop") + USAGE + DONE
    assert play((2.0, stream), max_output_tokens=ALLOWS_3).record.failure == "implausible usage"


@pytest.mark.parametrize("usage", [(5, 3), (5, 1), (5, 3, 5), (5, 3, 0), (MAX_TOKENS, 3)])
def test_usage_up_to_its_limits_is_complete(usage: tuple[int, ...]) -> None:
    stream = event("a") + event("b") + event(finish="stop") + usage_event(*usage) + DONE
    record = play((2.0, stream), max_output_tokens=ALLOWS_3).record
    assert (record.failure, record.output_tokens) == (None, usage[1])


def test_request_without_max_tokens_still_has_a_limit() -> None:
    stream = event("a") + event(finish="stop")
    assert play((2.0, stream + usage_event(5, MAX_TOKENS) + DONE)).record.failure is None
    assert play((2.0, stream + usage_event(5, MAX_TOKENS + 1) + DONE)).record.failure == "implausible usage"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"error": "plain"}', "plain"),
        ('{"message": "top level"}', "top level"),
        ('{"error": null, "message": "top level"}', "top level"),
        ('{"error": {"message": null}, "message": null, "detail": "below"}', "below"),
        ("<html>oops", "<html>oops"),
        ("", "empty body"),
    ],
)
def test_error_messages_of_other_formats_are_found(body: str, message: str) -> None:
    assert error_message(body) == message


def chunk(delta: dict[str, object], **fields: object) -> bytes:
    body = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}], **fields}
    return f"data: {json.dumps(body)}\n\n".encode()


TOOL = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": ""}}


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"content": [{"type": "text", "text": "a"}]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "a"}]}]},
        {"content": None, "reasoning": "a"},
        {"reasoning_content": "a"},
        {"thinking": "a"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "a"}]},
        {"content": "", "refusal": "I"},
        {"role": "assistant", "content": None, "tool_calls": [TOOL]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {"function_call": {"name": "f", "arguments": ""}},
        {"audio": {"id": "x", "data": "AAAA"}},
        {"audio": {"id": "x", "transcript": "a"}},
        {"images": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "a"}]},
    ],
)
def test_first_token_comes_with_the_first_output_of_any_kind(delta: dict[str, object]) -> None:
    nothing = {"role": "assistant", "content": "", "refusal": None, "tool_calls": [], "audio": {"id": "x", "data": ""}}
    ends = chunk({}) + event(finish="tool_calls") + USAGE + DONE
    response = play((2.0, chunk(nothing)), (3.0, chunk(delta)), (4.0, chunk(delta)), (5.0, ends))
    record = response.record
    assert (record.failure, record.first_text_s, record.times_s.tolist()) == (None, 3.0, [3.0, 4.0])
    assert (record.output_tokens, record.finish_reason) == (2, "tool_calls")
    assert response.is_text == (bool(response.content or response.reasoning))
    without_usage = play((2.0, chunk(nothing)), (3.0, chunk(delta)), (5.0, event(finish="stop") + DONE)).record
    assert without_usage.output_tokens == 1


@pytest.mark.parametrize(
    "empty",
    [
        {"content": [{"type": "text", "text": ""}]},
        {"content": [{"type": "output_text", "text": "", "annotations": []}, {"type": "text"}, {}, None, ""]},
        {"content": [{"type": "thinking", "thinking": [{"type": "text", "text": ""}]}]},
        {"content": "", "thinking_blocks": [{"type": "thinking", "thinking": "", "signature": None}]},
        {"reasoning_details": [{"type": "reasoning.text", "text": "", "format": "x", "index": 0}]},
        {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": ""}}], "function_call": {"name": ""}},
        {"audio": {"id": "x", "expires_at": 1729018505}, "images": [{"type": "image_url", "image_url": {"url": ""}}]},
    ],
)
def test_part_without_content_is_no_first_token(empty: dict[str, object]) -> None:
    ends = event(finish="stop") + DONE
    record = play((2.0, chunk(empty)), (3.0, chunk({"content": "a"})), (4.0, chunk(empty)), (5.0, ends)).record
    assert (record.failure, record.first_text_s, record.output_tokens) == (None, 3.0, 1)


EMPTY_FIELDS = '{"message": "", "type": "", "param": null, "code": 0}'  # as Go writes a struct


@pytest.mark.parametrize("error", ["null", "{}", '""', "false", "[]", EMPTY_FIELDS, '{"message": null}'])
def test_empty_error_is_no_error(error: str) -> None:
    """As gateways add it to the chunk of the usage, or to all of them."""
    text = b'data: {"choices": [{"delta": {"content": "a"}}], "error": ' + error.encode() + b"}\n\n"
    usage = USAGE.replace(b"{", b'{"error": ' + error.encode() + b", ", 1)
    record = play((2.0, text + text + event(finish="stop") + usage + DONE)).record
    assert (record.failure, record.output_tokens) == (None, 2)


@pytest.mark.parametrize(
    ("told", "message"),
    [
        (b'data: {"error": {"message": "gone", "code": 500}}\n\n', "gone"),
        (b'data: {"choices": [], "error": "gone"}\n\n', "gone"),
        (b'data: {"choices": [{"delta": {"content": ""}}], "error": {"message": "gone"}}\n\n', "gone"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "error": {"code": 502}}\n\n', ""),
        (b'data: {"object": "error", "message": "gone", "code": 400}\n\n', "gone"),
        (b'data: {"choices": [{"delta": {}, "finish_reason": "stop", "error": {"message": "gone"}}]}\n\n', "gone"),
        (b'event: error\ndata: {"message": "gone"}\n\n', "gone"),
        (b"event:error\r\ndata: gone\r\n\r\n".replace(b"gone", b'{"detail":"gone"}'), "gone"),
    ],
)
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_error_within_a_stream_is_a_failure_wherever_it_stands(told: bytes, message: str, size: int) -> None:
    stream = event("a") + told + event(finish="stop") + USAGE + DONE
    record = play(*((2.0, stream[at : at + size]) for at in range(0, len(stream), size))).record
    assert record.failure == "error event"
    assert message in (record.detail or "")


@pytest.mark.parametrize(
    "keep_alive",
    [
        b": ping\n\n",
        b"data:\n\n",
        b"data: \r\n\r\n",
        b'event: ping\ndata: {"type": "ping"}\n\n',
        b"event: error\n\n",
        b"\n\n",
        b"event: ping\ndata: keep-alive\n\n",
        b"event:heartbeat\r\ndata: 12:00:01\r\n\r\n",
        b'data: {"choices": [{"index": 0, "delta": [], "finish_reason": null}], "usage": []}\n\n',
    ],
)
def test_what_keeps_a_connection_open_is_no_answer(keep_alive: bytes) -> None:
    parts = [keep_alive, event("a"), keep_alive, event(" b"), keep_alive, event(finish="stop"), USAGE, keep_alive, DONE]
    record = play(*((2.0 + at, part) for at, part in enumerate(parts))).record
    assert (record.failure, record.times_s.tolist(), record.output_tokens) == (None, [3.0, 5.0], 2)


@pytest.mark.parametrize(
    "end",
    [
        b"data: [DONE]",
        b"data:[DONE]\n",
        b"data: [DONE] \r\n\r\n",
        DONE + b"event: cost\ndata: 0.1 USD\n\n",
        DONE + b"data: x\n\n",
    ],
)
@pytest.mark.parametrize("size", [1, 10_000])
def test_end_mark_of_any_form_ends_the_answer(end: bytes, size: int) -> None:
    stream = event("a") + event(finish="stop") + USAGE + end
    record = play(*((2.0, stream[at : at + size]) for at in range(0, len(stream), size))).record
    assert (record.failure, record.saw_done, record.output_tokens) == (None, True, 2)


@pytest.mark.parametrize(
    "end", [b"data: [DO", b'data: {"choices"', b"event: ping", b"x: [DONE]", b"data: x\ndata: [DONE]"]
)
def test_other_unfinished_events_are_a_truncated_stream(end: bytes) -> None:
    assert play((2.0, event("a") + event(finish="stop") + USAGE + end)).record.failure == "truncated stream"


def usage(**counts: object) -> bytes:
    return f"data: {json.dumps({'choices': [], 'usage': counts})}\n\n".encode()


@pytest.mark.parametrize(
    ("stream", "counts"),
    [
        (event("a") + event("b") + event(finish="stop") + DONE + USAGE, (5, 2)),
        (event("a") + event(finish="stop") + usage(prompt_tokens=5.0, completion_tokens=2.0) + DONE, (5, 2)),
        (event("a", usage=1) + event("b", usage=2) + event(finish="stop", usage=2) + DONE, (5, 2)),
        (event(role=True, usage=0) + event("a") + event("b") + event(finish="stop", usage=2) + DONE, (5, 2)),
        (event("a") + event(finish="stop") + usage(prompt_tokens=None, completion_tokens=3) + DONE, (0, 3)),
        (event("a") + event(finish="stop") + usage(prompt_tokens=5) + DONE, (5, 1)),
        (event("a") + event(finish="stop") + usage() + DONE, (0, 1)),
        (event("a", finish="stop") + usage(prompt_tokens=5, completion_tokens=2, prompt_tokens_details=[{}]), (5, 2)),
        (event("a") + USAGE.replace(b"[]", b"null") + event(finish="stop") + b'data: {"usage": null}\n\n', (5, 2)),
        (
            event("a") + event(finish="stop")
            + usage(prompt_tokens=5, completion_tokens=2, prompt_tokens_details=None, completion_tokens_details=None),
            (5, 2),
        ),
    ],
)  # fmt: skip
def test_usage_is_read_wherever_gateways_put_it(stream: bytes, counts: tuple[int, int]) -> None:
    record = play((2.0, stream)).record
    assert (record.failure, record.prompt_tokens, record.output_tokens) == (None, *counts)


@pytest.mark.parametrize("counts", [{"completion_tokens": 1.5}, {"completion_tokens": 1e300}, {"prompt_tokens": 0.5}])
def test_counts_that_are_no_numbers_of_tokens_are_implausible(counts: dict[str, float]) -> None:
    stream = event("a") + event(finish="stop") + usage(**({"completion_tokens": 1} | counts)) + DONE
    assert play((2.0, stream)).record.failure == "implausible usage"


def test_empty_finish_reasons_need_the_end_mark() -> None:
    parts = event("a", finish="") + event("b", finish="")
    assert play((2.0, parts + DONE)).record.failure is None
    assert play((2.0, parts)).record.failure == "truncated stream"
    assert play((2.0, event("a", finish="length") + event("", finish="") + DONE)).record.finish_reason == "length"


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("size", [1, 5, 10_000])
def test_form_of_the_event_stream_does_not_matter(newline: bytes, size: int) -> None:
    """Line ends, missing spaces, ids, and data of several lines, however they are split."""
    first = b'id: 1\ndata:{"choices": [{"index": 0,\ndata: "delta": {"content": "a"}}]}\n\n'
    stream = b"\xef\xbb\xbf: hello\n\n" + first + event(" b") + event(finish="stop") + USAGE + b"retry: 5\n" + DONE
    stream = stream.replace(b"\n", newline)
    response = play(*((2.0, stream[at : at + size]) for at in range(0, len(stream), size)))
    assert (response.record.failure, response.content, response.record.saw_done) == (None, "a b", True)
