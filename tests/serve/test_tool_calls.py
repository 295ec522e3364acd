"""Tools through the `openai` client and over plain HTTP. The scripted engine repeats the prompt as its answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from server_harness import MODEL, RunningServer, chat_body, scripted_server

from meltcore.serve.tasks.generation.tools import MAX_TOOLS, MAX_TOOLS_BYTES

pytestmark = pytest.mark.slow

END = "~"  # ends the scripted answer
# It writes the last message, and shows by a comment how the model calls.
TEMPLATE = (
    "{# tools <tool_call> enable_thinking #}{{ messages[-1].content }}"
    "{% if messages[-1].content == 'tools:' %}{{ tools | map(attribute='function.name') | join(' ') }}{% endif %}"
    "{% if messages[-1].content == 'begin:' and add_generation_prompt %}A:{% endif %}"
)
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
PING = {"type": "function", "function": {"name": "ping"}}
TOOLS = [WEATHER, PING]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
EMPTY = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    settings = {"chat_template": str(template), "max_model_len": 2000}
    with scripted_server("--tokens-per-step", "3", engine=settings) as running:
        yield running
        running.check_no_leak()


def ask(client: openai.OpenAI, written: str, **fields: Any) -> Any:
    stop = {"stop_token_ids": [ord(END)]} | fields.pop("extra_body", {})
    messages = [{"role": "user", "content": written + END}]
    return client.chat.completions.create(
        model=MODEL, **{"tools": TOOLS, "messages": messages} | fields, extra_body=stop
    )  # fmt: skip


def test_calls_of_an_answer(client: openai.OpenAI) -> None:
    choice = ask(client, f"Let me look.\n{CALL}\n{EMPTY}").choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me look.")
    calls = choice.message.tool_calls
    assert [(call.type, call.function.name, call.function.arguments) for call in calls] == [
        ("function", "get_weather", '{"place": "Bonn"}'),
        ("function", "ping", "{}"),
    ]
    assert calls[0].id != calls[1].id
    assert all(call.id.startswith("call_") for call in calls)
    assert ask(client, CALL).choices[0].message.content is None
    both = ask(client, CALL, n=2).choices
    assert [(choice.index, choice.finish_reason) for choice in both] == [(0, "tool_calls"), (1, "tool_calls")]
    assert both[0].message.tool_calls[0].id != both[1].message.tool_calls[0].id


def test_tokenize_takes_tools(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "tools:"}], "tools": TOOLS}
    tokens = server.post("/tokenize", body).json["tokens"]
    assert server.post("/detokenize", {"tokens": tokens}).json["prompt"] == "tools:get_weather ping"
    answer = server.post("/tokenize", body | {"tools": [PING, PING]})
    assert (answer.status, answer.error["param"]) == (400, "tools")


def test_the_answer_may_begin_without_a_message_of_its_own(server: RunningServer) -> None:
    body = chat_body("begin:", max_tokens=8)
    for fields, expected in (
        ({}, "begin:A:"),
        ({"add_generation_prompt": True}, "begin:A:"),
        ({"add_generation_prompt": False}, "begin:be"),
    ):
        answer = server.post("/v1/chat/completions", body | fields).json
        assert answer["choices"][0]["message"]["content"] == expected
        counted = server.post("/tokenize", {"messages": body["messages"]} | fields).json["count"]
        assert counted == answer["usage"]["prompt_tokens"] == len(expected.removesuffix("be"))


@pytest.mark.parametrize("written", [CALL, f"{EMPTY}\n{CALL}", f"Look.\n{CALL}\n{CALL}\n{EMPTY}", "No call."])
def test_streamed_calls_equal_those_of_a_whole_answer(client: openai.OpenAI, written: str) -> None:
    whole = ask(client, written).choices[0]
    text, calls, reasons = "", dict[int, dict[str, str]](), []
    for event in ask(client, written, stream=True):
        delta = event.choices[0].delta
        text += delta.content or ""
        reasons.append(event.choices[0].finish_reason)
        assert delta.tool_calls != []
        for part in delta.tool_calls or ():
            call = calls.setdefault(part.index, {"id": part.id, "name": part.function.name, "arguments": ""})
            assert (part.id is None) == (part.function.name is None)
            call["arguments"] += part.function.arguments
    assert text == (whole.message.content or "")
    assert [(call["name"], call["arguments"]) for call in calls.values()] == [
        (call.function.name, call.function.arguments) for call in whole.message.tool_calls or ()
    ]
    assert [*calls] == list(range(len(calls)))
    assert all(call["id"] for call in calls.values())
    assert reasons[-1] == whole.finish_reason == ("tool_calls" if calls else "stop")
    assert reasons[:-1] == [None] * (len(reasons) - 1)


def test_client_joins_a_stream_itself(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": CALL + END}]
    extra = {"stop_token_ids": [ord(END)]}
    with client.chat.completions.stream(model=MODEL, messages=messages, tools=TOOLS, extra_body=extra) as stream:
        kinds = [event.type for event in stream]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert kinds.count("tool_calls.function.arguments.delta") > 2
    assert json.loads(call.function.arguments) == {"place": "Bonn"}


def test_calls_and_their_results_can_be_sent_back(client: openai.OpenAI) -> None:
    message = ask(client, f"{CALL}\n{EMPTY}").choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in message.tool_calls]
    messages = [
        {"role": "user", "content": "x"},
        message.model_dump(),
        *results,
        {"role": "user", "content": "ab" + END},
    ]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, tools=TOOLS, extra_body={"stop_token_ids": [ord(END)]}
    )
    assert answer.choices[0].message.content == "ab"


def test_none_leaks_neither_calls_nor_markup(client: openai.OpenAI) -> None:
    choice = ask(client, f"Well.\n{CALL}", tool_choice="none").choices[0]
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "Well.", None)
    text = "".join(
        event.choices[0].delta.content or "" for event in ask(client, f"{CALL}\nWell.", tool_choice="none", stream=True)
    )
    assert text == "Well."


def test_one_call_where_several_are_not_wanted(client: openai.OpenAI) -> None:
    message = ask(client, f"{EMPTY}\n{CALL}", parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["ping"]
    assert message.content is None


def test_cut_call_is_a_call_that_can_be_sent_back(client: openai.OpenAI) -> None:
    """The finish reason says that the call did not end. A stream joins to the whole answer."""
    written = f"{CALL}\n{CALL}"
    for size in (40, len(CALL) - 23, len(CALL) + 60):
        choice = ask(client, written, max_tokens=size).choices[0]
        assert choice.finish_reason == "length"
        calls = choice.message.tool_calls or []
        is_begun = '"arguments": {' in written[:size].rpartition("<tool_call>")[2]
        assert len(calls) == size // len(CALL) + is_begun
        assert (choice.message.content or "") == ("" if is_begun else written[:size])
        events = [event.choices[0] for event in ask(client, written, max_tokens=size, stream=True)]
        assert events[-1].finish_reason == "length"
        assert "".join(event.delta.content or "" for event in events) == (choice.message.content or "")
        parts = [part for event in events for part in event.delta.tool_calls or ()]
        assert "".join(part.function.arguments for part in parts) == "".join(call.function.arguments for call in calls)
        if is_begun:
            assert not calls[-1].function.arguments.endswith("}")
            answer = choice.message.model_dump(include={"role", "content", "tool_calls"})
            results = [{"role": "tool", "tool_call_id": call.id, "content": "cut"} for call in calls]
            messages = [{"role": "user", "content": "x"}, answer, *results, {"role": "user", "content": f"on{END}"}]
            assert ask(client, "", messages=messages).choices[0].message.content == "on"


def test_broken_call_is_text(client: openai.OpenAI) -> None:
    for written in ("<tool_call>\nnothing\n</tool_call>", CALL.replace("}}", "}]")):
        choice = ask(client, written).choices[0]
        assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", written, None)


def test_broken_call_of_a_stream_ends_as_it_stands(client: openai.OpenAI) -> None:
    """Clients cannot take back the parts that were sent. They check arguments themselves, as with OpenAI."""
    for written, rest in ((CALL.replace("}}", "} oh"), " oh\n</tool_call>"), (f"{CALL[:-16]}\n", "")):
        events = [event.choices[0] for event in ask(client, written, stream=True)]
        parts = [part for event in events for part in event.delta.tool_calls or ()]
        assert "".join(part.function.arguments for part in parts).startswith('{"place": "')
        assert "".join(event.delta.content or "" for event in events) == rest
        assert events[-1].finish_reason == "tool_calls"


def test_without_tools_nothing_is_a_call(client: openai.OpenAI) -> None:
    choice = ask(client, CALL, tools=openai.NOT_GIVEN).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("stop", CALL)


def named(name: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": schema}
    return schema


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [named("a"), named("b"), named("a")]}, "tools", "'a'"),
    ({"tools": [named("")]}, "tools[0].function.name", "1 to 128"),
    ({"tools": [named("a b")]}, "tools[0].function.name", "'a b'"),
    ({"tools": [named("a" * 129)]}, "tools[0].function.name", "128"),
    ({"tools": [named(5)]}, "tools[0].function.name", "str"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "required"),
    ({"tools": [{"type": "custom", "function": {"name": "a"}}]}, "tools[0].type", "function"),
    ({"tools": {"a": 1}}, "tools", "array"),
    ({"tools": [named("a", parameters="x")]}, "tools[0].function.parameters", "object"),
    ({"tools": [named("a", parameters=[1])]}, "tools[0].function.parameters", "object"),
    ({"tools": [named("a", parameters={"type": "string"})]}, "tools[0].function.parameters", "'string'"),
    ({"tools": [named("a", parameters=nested(129))]}, "tools[0].function.parameters", "128"),
    ({"tools": [named("a", parameters=nested(400))]}, "tools[0].function.parameters", "128"),
    ({"tools": [named(f"f{at}") for at in range(10_000)]}, "tools", f"10000 tools; the limit is {MAX_TOOLS}"),
    ({"tools": [named("a", description="x" * 1_048_600)]}, "tools", f"the limit is {MAX_TOOLS_BYTES}"),
    ({"tools": TOOLS, "tool_choice": named("other")}, "tool_choice.function.name", "'other'"),
    ({"tools": TOOLS, "tool_choice": "sometimes"}, "tool_choice", "auto"),
    ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function", "required"),
    ({"tool_choice": named("ping")}, "tool_choice", "needs tools"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "bool"),
]


@pytest.mark.parametrize(("fields", "param", "part"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_bad_tools_are_a_400_that_names_value_and_limit(
    server: RunningServer, fields: dict[str, Any], param: str, part: str
) -> None:
    answer = server.post("/v1/chat/completions", chat_body("hello") | fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert part in answer.error["message"]
    assert len(answer.body) < 1000


@pytest.mark.parametrize(
    "arguments",
    ["", "{}", "null", "no", "[1]", '{"a": 1', "5", '{"a": NaN}', "[" * 100_000, '{"a":' * 400 + "5" + "}" * 400],
)
def test_arguments_of_earlier_calls_need_not_be_objects(server: RunningServer, arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": arguments}}
    history = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "ab"}]
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": history, "max_tokens": 2})
    if "5}" not in arguments:
        assert answer.json["choices"][0]["message"]["content"] == "ab"
    else:
        assert answer.error["param"] == "messages[0].tool_calls[0].function.arguments"


def test_calls_and_results_of_a_history_need_no_counterpart(server: RunningServer) -> None:
    """Small models lose them, and clients drop old messages: the rest of a history is still of use."""
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    result, user = {"role": "tool", "tool_call_id": "other", "content": "x"}, {"role": "user", "content": "ab"}
    for history in ([calls, user], [result, user], [calls, result, user]):
        answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": history, "max_tokens": 2})
        assert answer.json["choices"][0]["message"]["content"] == "ab"


def test_user_has_no_calls(server: RunningServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    messages = [{"role": "user", "content": "x", "tool_calls": [call]}]
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": messages})
    assert answer.error["param"] == "messages[0].tool_calls"


def test_reasoning_effort_needs_a_template_that_follows_it(server: RunningServer) -> None:
    assert server.chat("ab", max_tokens=2, reasoning_effort="high").status == 200
    assert server.chat("ab", max_tokens=2, reasoning_effort="none").status == 200


def test_template_gets_tools_and_the_names_of_results(tmp_path: Path) -> None:
    """Ids have nine letters for Mistral, whose templates refuse others."""
    template = tmp_path / "tools.jinja"
    template.write_text(
        "{% if tools %}{{ tools | map(attribute='function.name') | join(' ') }}{% else %}none{% endif %}"
        "{% for m in messages %}{% if m.role == 'tool' %}|{{ m.name }}={{ m.content }}{% endif %}{% endfor %}"
        "{% if messages[-1].role == 'user' %}{{ messages[-1].content }}{% endif %}"
    )
    settings = {"chat_template": str(template), "tool_call_parser": "mistral"}
    with scripted_server(engine=settings) as server:
        written = '[TOOL_CALLS][{"name": "ping", "arguments": {}}]'
        stop = {"stop_token_ids": [ord(END)], "tools": TOOLS}
        message = server.chat(written + END, **stop).json["choices"][0]["message"]
        assert message["content"] == "get_weather ping"
        [call] = message["tool_calls"]
        assert len(call["id"]) == 9
        assert call["id"].isalnum()
        result = {"role": "tool", "tool_call_id": call["id"], "content": f"12{END}"}
        messages = [{"role": "user", "content": "x"}, message, result]
        for choice, expected in (("auto", "get_weather ping|ping=12"), ("none", "none|ping=12")):
            body = {"model": MODEL, "messages": messages, "tool_choice": choice, **stop}
            assert server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == expected


def test_model_whose_template_has_no_tools_refuses_them(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[-1].content }}{# tools #}")
    with scripted_server(engine={"chat_template": str(template)}) as server:
        error = server.chat("ab", tools=TOOLS).error
        assert (error["param"], "--tool-call-parser" in error["message"]) == ("tools", True)
        assert server.chat("ab", tools=TOOLS, tool_choice="none", max_tokens=2).status == 200
        assert server.chat("ab", reasoning_effort="high").error["param"] == "reasoning_effort"


def test_parse_helper_reads_typed_arguments(client: openai.OpenAI) -> None:
    """The helper of the client sends strict tools, which a grammar enforces."""

    class GetWeather(pydantic.BaseModel):
        place: str

    tool = openai.pydantic_function_tool(GetWeather)
    messages: Any = [{"role": "user", "content": CALL.replace("get_weather", "GetWeather") + END}]
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=messages,
        tools=[tool],
        tool_choice="required",
        extra_body={"stop_token_ids": [ord(END)]},
    )
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.function.parsed_arguments == GetWeather(place="Bonn")
