"""Answers in other forms than OpenAI's chats: however tokens arrive, a stream joins to the whole answer."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from waiting import WAIT_S

from meltcore.common.errors import RequestError
from meltcore.protocol.generation import SequenceOutput
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.serve.dialects.messages import MessageWriter, complete_members
from meltcore.serve.dialects.response_forms import ResponsesRequest
from meltcore.serve.dialects.response_writer import REASONING, CalledTool, ResponsesWriter, read_reasoning
from meltcore.serve.requests.protocol import StreamOptions
from meltcore.serve.tasks.generation.completions import _stream
from meltcore.serve.tasks.generation.generation_ticket import Choice, GenerationTicket
from meltcore.serve.tasks.generation.responses import ChatResponseWriter
from meltcore.text.answer_format import answer_format
from meltcore.text.call_scanners import ToolSet
from meltcore.text.chat_template import ChatTemplate
from meltcore.text.tokenizer import Tokenizer

MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
RAW = tokenizers.Tokenizer.from_str(Tokenizer.synthetic_bytes(300)._backend.to_str())
RAW.add_tokens([tokenizers.AddedToken(text, special=False) for text in MARKS])
TOKENIZER = Tokenizer(RAW)
FORM = answer_format(TOKENIZER, {}, ChatTemplate("tools <think>"), calls="hermes")
TOOLS = ToolSet({"get": {}, "patch": {}})
CALLED = {"patch": CalledTool("patch", is_custom=True), "get": CalledTool("get", "weather")}
GET = '<tool_call>\n{"name": "get", "arguments": {"place": "Bonn", "days": 3}}\n</tool_call>'
PATCH = '<tool_call>\n{"name": "patch", "arguments": {"input": "+a\\n\\"b\\" ü"}}\n</tool_call>'
REASONED = "<think>I am\nthinking.</think>"
BROKEN = '<tool_call>\n{"name": "get", "arguments": {"place": "Bonn", oh'
ANSWERS = [
    *("hello", "", REASONED, REASONED + "So: 5.", GET, f"Look. {GET}{GET}", f"{PATCH}after", f"a{PATCH}{GET} b {GET}c"),
    *(
        f"{REASONED}{GET}",
        f"x{BROKEN}",
        f"{BROKEN}{GET}",
        f"{GET}{BROKEN}</tool_call> rest",
        "a <tool_call> that is none",
    ),
]


def write(
    kind: str, answer: str, cuts: list[int], end: Any = "stop", *, is_whole: bool = False, stop: tuple[str, ...] = ()
) -> bytes:
    """The stream of an answer whose tokens arrive in pieces, or the whole answer."""
    ticket = GenerationTicket(arrived_s=0.0, streaming=not is_whole, streams_calls=kind == "responses")
    tools = TOOLS._replace(is_streamed=ticket.streams_calls)
    Choice(ticket, [1] * 7, SamplingParams(max_tokens=10_000, stop=stop), TOKENIZER, FORM, tools=tools)
    request = ResponsesRequest(input="x", include=[REASONING], reasoning=None)
    options = StreamOptions()
    writer = (
        MessageWriter(ticket, "m", options)
        if kind == "messages"
        else ResponsesWriter(request, CALLED, ticket, "m", options)
    )
    [choice], ids = ticket.choices, TOKENIZER.encode(answer, add_special_tokens=False)
    data = b""
    for first, last in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        is_end = last == len(ids)
        choice.accept(SequenceOutput("id", ids[first:last], end if is_end else None))
        if not is_whole and choice.take_update():
            data += writer.event(choice)
        if is_end:
            break
    return writer.body(ticket) if is_whole else data + b"".join(writer.end_events(ticket))


def events_of(data: bytes) -> list[dict[str, Any]]:
    found = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        if event == ":":  # a comment
            continue
        name, body = event.split("\n")
        found.append(json.loads(body.removeprefix("data: ")))
        assert found[-1]["type"] == name.removeprefix("event: ")
    return found


def cuts_of(answer: str, seed: int) -> list[int]:
    length = len(TOKENIZER.encode(answer, add_special_tokens=False))
    places = range(1, max(1, length))
    return sorted(random.Random(seed).sample(places, min(len(places), seed * 3)))


def joined(kind: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    """The text, the reasoning and the complete calls of an answer's blocks or items."""
    found: dict[str, Any] = {"text": "", "reasoning": "", "calls": []}
    for block in content:
        if block["type"] in ("text", "message"):
            found["text"] += block["text"] if kind == "messages" else block["content"][0]["text"]
        elif block["type"] in ("thinking", "reasoning"):
            found["reasoning"] += block["thinking"] if kind == "messages" else block["content"][0]["text"]
        elif block["type"] == "tool_use":
            found["calls"].append((block["name"], block["input"]))
        elif block["status"] == "completed":
            found["calls"].append((block["name"], block.get("arguments", block.get("input"))))
    return found


def blocks_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The blocks of a stream of messages, joined as clients do."""
    blocks: list[dict[str, Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            arguments = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                arguments += delta["partial_json"]
            else:
                name = delta["type"].removesuffix("_delta")
                blocks[-1][name] += delta[name]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(arguments or "{}")
    return blocks


@pytest.mark.parametrize("kind", ["messages", "responses"])
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_stream_joins_to_the_whole_answer(kind: str, answer: str) -> None:
    whole = json.loads(write(kind, answer, [], is_whole=True))
    content = whole["content" if kind == "messages" else "output"]
    expected = joined(kind, content)
    assert any(
        block["type"] in ("text", "message", "tool_use", "function_call", "custom_tool_call") for block in content
    )
    for seed in range(12):
        events = events_of(write(kind, answer, cuts_of(answer, seed)))
        if kind == "messages":
            found = joined(kind, blocks_of(events))
        else:
            found = joined(kind, events[-1]["response"]["output"])
            check_events(events)
        if kind == "messages" or BROKEN not in answer:
            assert found == expected
        else:
            assert found["calls"] == expected["calls"]
            assert BROKEN not in found["text"]


def order(content: list[dict[str, Any]]) -> list[str]:
    """What an answer's blocks or items are, in their order: texts, and the names of calls."""
    texts = ([block, *block.get("content", ())] for block in content)
    found = [next((part[name] for part in parts for name in ("text", "thinking", "name") if name in part), "")
             for parts in texts]  # fmt: skip
    return [each.strip() for each in found if each.strip()]


ORDERS = [
    (f"a{PATCH}{GET} b {GET}c", ["a", "patch", "get", "b", "get", "c"]),
    (f"Look. {REASONED}{GET}{REASONED}So: {PATCH} 5.",
     ["Look.", "I am\nthinking.", "get", "I am\nthinking.", "So:", "patch", "5."]),
    (f"{GET}{REASONED}", ["get", "I am\nthinking."]),
    (f"x{BROKEN}</tool_call> y{GET}z", None),
    (f"ab{GET}{PATCH}c", ["ab", "get", "patch", "c"]),  # "b" may begin the stop string
]  # fmt: skip


@pytest.mark.parametrize("kind", ["messages", "responses"])
@pytest.mark.parametrize(("answer", "expected"), ORDERS)
def test_parts_have_the_order_in_which_they_were_written(kind: str, answer: str, expected: list[str] | None) -> None:
    """Also if text before and after a call arrives with it, as several tokens of one step."""
    whole = json.loads(write(kind, answer, [], is_whole=True, stop=("b!",)))
    names = [CALLED[name].name if kind == "responses" and name in CALLED else name for name in expected or ()]
    if expected is not None:
        assert order(whole["content" if kind == "messages" else "output"]) == names
    for seed in range(12):
        events = events_of(write(kind, answer, cuts_of(answer, seed), stop=("b!",)))
        found = blocks_of(events) if kind == "messages" else events[-1]["response"]["output"]
        if expected is not None:
            assert order(found) == names
        else:
            assert (order(found)[0][0], order(found)[-2:]) == ("x", ["get", "z"])


@pytest.mark.parametrize("name", ["get", "patch"])
def test_a_broken_call_of_a_stream_of_responses_ends_as_it_stands(name: str) -> None:
    """Its characters come once, as an incomplete item, however the tokens arrive."""
    written = BROKEN.replace("get", name)
    for seed in range(12):
        events = events_of(write("responses", f"x{written}", cuts_of(written, seed)))
        check_events(events)
        output = events[-1]["response"]["output"]
        [call] = [item for item in output if item["type"] != "message"]
        assert joined("responses", output)["text"] == "xoh"
        assert (call["status"], events[-1]["type"]) == ("incomplete", "response.completed")
        assert call.get("arguments", call.get("input")) == '{"place": "Bonn", '


def check_events(events: list[dict[str, Any]]) -> None:
    """Numbers are consecutive, items do not interleave, and deltas join to what `done` says."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    items: list[dict[str, Any]] = []
    deltas = ""
    assert sum(event["type"].endswith("output_item.added") for event in events) == len(events[-1]["response"]["output"])
    for event in events[2:-1]:
        assert event["output_index"] == len(items)
        if "delta" in event:
            deltas += event["delta"]
        for field in ("text", "arguments", "input"):
            if field in event:
                assert event[field] == deltas
        if event["type"] == "response.output_item.added":
            begun = event["item"]
            deltas = ""
        if event["type"] == "response.output_item.done":
            assert (event["item"]["id"], event["item"]["type"]) == (begun["id"], begun["type"])
            items.append(event["item"])
        elif "item_id" in event:
            assert event["item_id"] == begun["id"]
    assert events[-1]["response"]["output"] == items
    assert len({item["id"] for item in items}) == len(items)


def test_blocks_of_an_answer_have_their_order_and_numbers() -> None:
    ticket = GenerationTicket(arrived_s=0.0, streaming=True)
    choice = Choice(ticket, [1] * 7, SamplingParams(), TOKENIZER, FORM, tools=TOOLS)
    writer = MessageWriter(ticket, "m", StreamOptions())
    data, parts = b"", ["<think>I ", "think</think>", "So", GET, ""]
    for part in parts:
        ids = TOKENIZER.encode(part, add_special_tokens=False)
        choice.accept(SequenceOutput("id", ids, None if part else "stop", cached_tokens=2))
        data += writer.event(choice)
    events = events_of(data)
    begin, delta, end = (f"content_block_{name}" for name in ("start", "delta", "stop"))
    assert [name for name, _ in itertools.groupby(event["type"] for event in events)] == [
        *("message_start", begin, delta, end, begin, delta, end, begin, delta, end, "message_delta", "message_stop"),
    ]
    kinds = [event["content_block"]["type"] for event in events if "content_block" in event]
    assert kinds == ["thinking", "text", "tool_use"]
    assert events[0]["message"]["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 2,
        "output_tokens": 3,
    }
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert [event["index"] for event in events if "index" in event] == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_usage_of_chats_counts_the_tokens_of_reasoning() -> None:
    """Two answers of which one reasons: a stream and a whole answer say the same."""
    ticket = GenerationTicket(arrived_s=0.0, streaming=True)
    for _ in range(2):
        Choice(ticket, [1] * 7, SamplingParams(), TOKENIZER, FORM, tools=TOOLS)
    options = StreamOptions(include_usage=True, continuous_usage_stats=True)
    writer, seen = ChatResponseWriter(ticket, "m", options), []
    for choice, answer in zip(ticket.choices, (f"{REASONED}So.", "So."), strict=True):
        for token_id in TOKENIZER.encode(answer, add_special_tokens=False):
            choice.accept(SequenceOutput("id", [token_id], None))
            seen.append(json.loads(writer.event(choice)[6:])["usage"]["completion_tokens_details"])
        choice.accept(SequenceOutput("id", [], "stop"))
    num_reasoning = len("I am\nthinking.")
    assert [each["reasoning_tokens"] for each in seen[:19]] == [0, *range(1, num_reasoning + 1), *[num_reasoning] * 4]
    assert [each["reasoning_tokens"] for each in seen[19:]] == [0] * 3
    usages = [json.loads(writer.end_events(ticket)[0][6:])["usage"], json.loads(writer.body(ticket))["usage"]]
    assert [usage["completion_tokens_details"] for usage in usages] == [{"reasoning_tokens": num_reasoning}] * 2
    assert usages[0]["completion_tokens"] == num_reasoning + 2 + 3 + 3


def test_items_of_an_answer() -> None:
    whole = json.loads(write("responses", f"{REASONED}Look.{GET}{PATCH}", [], is_whole=True))
    reasoning, message, call, custom = whole["output"]
    assert (whole["status"], whole["store"], whole["incomplete_details"]) == ("completed", False, None)
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "I am\nthinking."}]
    assert read_reasoning(reasoning["encrypted_content"], "x") == "I am\nthinking."
    assert message["content"] == [{"type": "output_text", "text": "Look.", "annotations": [], "logprobs": []}]
    assert (call["namespace"], call["name"], call["arguments"]) == ("weather", "get", '{"place": "Bonn", "days": 3}')
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "patch", '+a\n"b" ü')
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("I am\nthinking.")


@pytest.mark.parametrize("cuts", [[], [3], [1, 2, 3, 4, 5, 6, 7]])
def test_an_answer_that_is_cut_is_incomplete(cuts: list[int]) -> None:
    last = events_of(write("responses", "not the end", cuts, "length"))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
    cut_call = events_of(write("responses", BROKEN[:-4], [40], "length"))[-1]["response"]
    [call] = cut_call["output"]
    assert (call["type"], call["status"], call["arguments"]) == ("function_call", "incomplete", '{"place": "Bonn"')
    assert (
        json.loads(write("responses", BROKEN[:-4], [], "length", is_whole=True))["output"][0]
        | {
            "id": call["id"],
            "call_id": call["call_id"],
        }
        == call
    )
    for end in range(PATCH.index("+"), PATCH.index("\n</")):
        events = events_of(write("responses", PATCH[:end], [40], "length"))
        check_events(events)
        [custom] = events[-1]["response"]["output"]
        assert (custom["type"], custom["status"]) == ("custom_tool_call", "incomplete")
        assert '+a\n"b" ü'.startswith(custom["input"])
    events = events_of(write("messages", BROKEN[:-4], [40], "length"))
    [block] = blocks_of(events)
    assert (block["type"], block["name"], block["input"]) == ("tool_use", "get", {"place": "Bonn"})
    assert events[-2]["delta"]["stop_reason"] == "max_tokens"
    whole = json.loads(write("messages", BROKEN[:-4], [], "length", is_whole=True))
    assert whole["content"] == [block | {"id": whole["content"][0]["id"]}]


def test_a_cut_object_keeps_its_complete_members() -> None:
    full = {"a": 'x, \\"}', "b": [1, {"c": "]"}], "d": {"e": {}}, "f": True, "g": None, "h": "", "i": 12, "j": -0.5}
    for separators in ((", ", ": "), (",", ":"), (" ,\n", " : ")):
        text = json.dumps(full, separators=separators)
        found = [json.loads(complete_members(text[:end])) for end in range(len(text) + 1)]
        assert all(each == dict(list(full.items())[: len(each)]) for each in found)
        assert [length for length, _ in itertools.groupby(map(len, found))] == [*range(len(full) + 1)]
        assert complete_members(text) == text
    assert complete_members('{"a": {}, "b": 12') == '{"a": {}}'


@pytest.mark.parametrize(("kind", "waiting"), [("messages", b'data: {"type":"ping"}'), ("responses", b":\n\n")])
def test_a_stream_is_not_silent_during_a_call_that_is_sent_late(kind: str, waiting: bytes) -> None:
    assert write(kind, PATCH, [40, 41, 42, 43]).count(waiting) == 3  # after the first events
    assert waiting not in write(kind, "hello", [1, 2, 3])


def test_a_failure_is_an_event_of_the_stream() -> None:
    ticket = GenerationTicket(arrived_s=0.0, streaming=True)
    choice = Choice(ticket, [1], SamplingParams(), TOKENIZER, FORM, tools=TOOLS)
    writer = ResponsesWriter(ResponsesRequest(input="x"), {}, ticket, "m", StreamOptions())
    choice.accept(SequenceOutput("id", [104], None))
    data = writer.event(choice) + writer.error_event(RequestError("lost", status=503, code="engine_dead"), "openai")
    last = events_of(data)[-1]
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "engine_dead", "message": "lost"}


@pytest.mark.parametrize("encrypted", ["", "gAAAAA", "meltcore.1.%", "meltcore.1./w=="])
def test_reasoning_of_other_servers_is_refused(encrypted: str) -> None:
    with pytest.raises(RequestError, match="was not written by this server") as caught:
        read_reasoning(encrypted, "input[1].encrypted_content")
    assert caught.value.code == "invalid_encrypted_content"


def test_messages_begin_once_an_engine_has_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments follow until there is output, whose first event has the usage of the last one.

    Nothing is sent from the queue, where the request may still be refused.
    """
    monkeypatch.setattr(MessageWriter, "waits_s", (0.0, 0.0))
    sent: list[Any] = []
    is_pinged = asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 4:
            is_pinged.set()

    async def run() -> None:
        ticket = GenerationTicket(arrived_s=0.0, streaming=True, streams_calls=False)
        choice = Choice(ticket, [1] * 7, SamplingParams(max_tokens=10), TOKENIZER, FORM)
        ticket.open_children = 1
        exchange: Any = SimpleNamespace(send=send, content_type=None, headers=[])
        answer = asyncio.create_task(_stream(exchange, ticket, MessageWriter(ticket, "m", StreamOptions())))
        for _ in range(20):
            await asyncio.sleep(0)
        assert sent == []
        choice.replica = 0
        await is_pinged.wait()
        assert not answer.done()
        ids = TOKENIZER.encode("hello", add_special_tokens=False)
        choice.accept(SequenceOutput("id", ids, "stop", cached_tokens=4))
        ticket.open_children = 0
        ticket.wake()
        await answer

    asyncio.run(asyncio.wait_for(run(), WAIT_S))
    assert sent[0]["type"] == "http.response.start"
    assert [message["body"] for message in sent[1:4]] == [b":\n\n"] * 3
    events = events_of(b"".join(message["body"] for message in sent[1:]))
    assert events[0]["message"]["usage"] == events[-2]["usage"]
    assert (events[-2]["usage"]["input_tokens"], events[-2]["usage"]["cache_read_input_tokens"]) == (3, 4)
    assert [event["type"] for event in events] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_stop", "message_delta"),
        "message_stop",
    ]
