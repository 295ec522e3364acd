"""OpenAI's /v1/responses through its client and over plain HTTP. The scripted engine repeats the prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pydantic
import pytest
from server_harness import MODEL, RunningServer, make_model, scripted_server

from meltcore.common.errors import RequestError
from meltcore.serve.dialects.response_forms import ResponsesRequest
from meltcore.serve.dialects.response_writer import REASONING, CalledTool, write_reasoning
from meltcore.serve.dialects.responses import INLINE_ITEMS, chat_of
from meltcore.serve.requests.protocol import NamedTool, decode_request
from meltcore.serve.tasks.generation.responses import OBFUSCATED_BYTES
from meltcore.serve.tasks.generation.text_function import TextFunction

USER = {"role": "user", "content": "x"}
END = "~"  # the token that ends the scripted answer
TEMPLATE = "{# tools <tool_call> reasoning_effort #}{{ messages[-1].content }}"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a place",
    "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    "strict": None,
}
GRAMMAR = {"type": "grammar", "syntax": "lark", "definition": 'start: ("+" /[^\\n]*/ "\\n")+'}
PATCH: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes files."}
TOOLS = [WEATHER, PATCH]
NAMESPACE = {"type": "namespace", "name": "far", "description": "Other places.", "tools": TOOLS}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
CUSTOM = '<tool_call>\n{"name": "patch", "arguments": {"input": "+a\\n"}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    model = make_model(tmp_path_factory.mktemp("model"), end_id=ord(END))
    template = model / "tools.jinja"
    template.write_text(TEMPLATE)
    settings = {"checkpoint": str(model), "chat_template": str(template), "max_model_len": 2000}
    with scripted_server("--tokens-per-step", "3", engine=settings, api_key="key") as running:
        yield running
        running.check_no_leak()


@pytest.mark.slow
def test_a_whole_answer(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="hello" + END, instructions="Be kind.", metadata={"a": "b"})
    assert (response.object, response.status, response.output_text) == ("response", "completed", "hello")
    assert (response.instructions, response.metadata, response.store) == ("Be kind.", {"a": "b"}, False)
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (6, 6, 12)
    cut = client.responses.create(
        model=MODEL, input="hello", max_output_tokens=2, store=True, temperature=0.5, top_p=0.9, user="u"
    )
    assert (cut.status, cut.output_text, cut.temperature, cut.store) == ("incomplete", "he", 0.5, False)
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.slow
def test_the_tokens_of_an_input_are_counted(client: openai.OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": [{"role": "user", "content": "hello" + END}], "tools": TOOLS}
    counted = client.responses.input_tokens.count(**asked, instructions="Be kind.")
    answer = client.responses.create(**asked, instructions="Be kind.")
    assert answer.usage is not None
    assert (counted.object, counted.input_tokens) == ("response.input_tokens", answer.usage.input_tokens)
    for change, param in (({"input": []}, "input"), ({"previous_response_id": "resp_1"}, "previous_response_id")):
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_tokens.count(**asked | change)
        assert caught.value.param == param


@pytest.mark.slow
def test_calls_of_an_answer_and_their_results(client: openai.OpenAI) -> None:
    asked = {"model": MODEL, "tools": TOOLS, "include": [REASONING]}
    response = client.responses.create(input=f"Look.{CALL}{CUSTOM}{END}", **asked)
    message, weather, patch = response.output
    assert (message.type, response.output_text) == ("message", "Look.")
    assert (weather.type, weather.name, weather.arguments) == ("function_call", "get_weather", '{"place": "Bonn"}')
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "patch", "+a\n")
    history = [{"role": "user", "content": "x"}, *(item.model_dump(exclude_none=True) for item in response.output)]
    history += [
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "done"},
        {"type": "function_call_output", "call_id": weather.call_id, "output": "12" + END},
    ]
    assert client.responses.create(input=history, **asked).output_text == "12"


@pytest.mark.slow
@pytest.mark.parametrize(
    "written", ["hello", CALL, f"Look.{CALL}{CUSTOM}", f"{CUSTOM} done", "a <tool_call> that is none"]
)
def test_a_stream_joins_to_the_whole_answer(client: openai.OpenAI, written: str) -> None:
    asked: Any = {"model": MODEL, "input": written + END, "tools": TOOLS}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        joined = stream.get_final_response()
    assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")

    def shown(response: Any) -> list[Any]:
        items = [item.model_dump(exclude={"id", "call_id"}, exclude_none=True) for item in response.output]
        for item in items:
            item.pop("parsed_arguments", None)
        return [response.output_text, [item for item in items if item["type"] != "message"], response.status]

    assert shown(joined) == shown(whole)
    assert joined.usage == whole.usage


@pytest.mark.slow
def test_obfuscated_deltas_have_lengths_of_whole_blocks(server: RunningServer) -> None:
    options = {"stream": True, "stream_options": {"include_obfuscation": True}}
    body = {"model": MODEL, "input": f"hé☃llo {CALL}{END}", "tools": TOOLS}
    key = {"authorization": "Bearer key"}
    events = server.post("/v1/responses", body | options, key).body.split(b"\n\n")
    deltas = [event for event in events if b'.delta"' in event]
    assert {(len(event) - len(b',"obfuscation":""') + 2) % OBFUSCATED_BYTES for event in deltas} == {0}
    padded = {msgspec.json.decode(event.partition(b"data: ")[2])["obfuscation"] for event in deltas}
    assert len(padded) == len(deltas) > 5
    assert b"obfuscation" not in b"".join(event for event in events if event not in deltas)
    plain = server.post("/v1/responses", body | {"stream": True}, key).body
    assert b"obfuscation" not in plain
    refused = server.post("/v1/responses", body | options | {"stream": False}, key)
    assert (refused.status, refused.error["param"]) == (400, "stream_options")


@pytest.mark.slow
@pytest.mark.parametrize("written", [CALL[:-20], f"Look.{CALL}{CALL[:-22]}oh"])
def test_a_stream_with_a_cut_or_broken_call_ends_well(client: openai.OpenAI, written: str) -> None:
    size: Any = {"max_output_tokens": len(written)}
    with client.responses.stream(model=MODEL, input=written + END, tools=TOOLS, **size) as stream:
        events = list(stream)
    added = [event.output_index for event in events if event.type == "response.output_item.added"]
    assert added == [*range(len(added))] == [e.output_index for e in events if e.type == "response.output_item.done"]
    assert events[-1].type == "response.incomplete"
    items = [(item.type, item.status) for item in events[-1].response.output]
    assert ("function_call", "incomplete") in items


@pytest.mark.slow
def test_a_cut_call_of_a_custom_tool_has_the_beginning_of_its_text(client: openai.OpenAI) -> None:
    written = '<tool_call>\n{"name": "patch", "arguments": {"input": "+a\\n+'
    asked: Any = {"model": MODEL, "input": written + "b", "tools": TOOLS, "max_output_tokens": len(written)}
    with client.responses.stream(**asked) as stream:
        *events, last = list(stream)
    seen = [getattr(event, "delta", getattr(event, "input", None)) for event in events if "_input." in event.type]
    assert seen == ["+a\n+"] * 2
    for response in (client.responses.create(**asked), last.response):
        assert (response.status, response.output[-1].input) == ("incomplete", "+a\n+")


@pytest.mark.slow
def test_a_long_conversation_is_translated_on_a_thread(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": "x"}] * INLINE_ITEMS + [{"role": "user", "content": "last" + END}]
    assert client.responses.create(model=MODEL, input=items).output_text == "last"
    with pytest.raises(openai.BadRequestError, match=r"input\[501\].type"):
        client.responses.create(model=MODEL, input=[*items, {"type": "other"}])


@pytest.mark.slow
def test_an_answer_is_parsed_into_a_model(client: openai.OpenAI) -> None:
    class Place(pydantic.BaseModel):
        name: str

    parsed = client.responses.parse(model=MODEL, input='{"name": "Bonn"}' + END, text_format=Place)
    assert parsed.output_parsed == Place(name="Bonn")
    with client.responses.stream(model=MODEL, input='{"name": "Bonn"}' + END, text_format=Place) as stream:
        assert stream.get_final_response().output_parsed == Place(name="Bonn")


@pytest.mark.slow
def test_wrong_keys_models_and_fields_are_errors_of_the_client(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="there is no model 'other' here"):
        client.responses.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    forced: Any = {"model": MODEL, "input": CUSTOM + END, "tool_choice": "required"}
    tool: Any = PATCH | {"format": GRAMMAR}
    assert client.responses.create(**forced, tools=[tool]).output[0].type == "custom_tool_call"
    bad: Any = PATCH | {"format": GRAMMAR | {"definition": "start: nothing"}}
    with pytest.raises(openai.BadRequestError, match="is not supported"):
        client.responses.create(**forced, tools=[bad])
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.responses.create(model=MODEL, input="x")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ({"max_output_tokens": 5000}, "max_output_tokens", "max_output_tokens is 5000"),
        ({"input": []}, "input", "input is empty"),
        ({"max_tokens": 5}, "max_tokens", "max_tokens: this field is not known here"),
        ({"messages": []}, "messages", "messages: this field is not known here"),
        ({"tools": [WEATHER, NAMESPACE | {"tools": [PATCH, WEATHER | {"parameters": {"type": "string"}}]}]},
         "tools[1].tools[1].parameters", "tools[1].tools[1].parameters must be the schema of an object"),
        ({"tools": [WEATHER, PATCH | {"name": "a b"}],
          "tool_choice": {"type": "allowed_tools", "tools": [{"type": "custom", "name": "a b"}]}},
         "tools[1].name", "tools[1].name must be"),
        ({"instructions": "x", "input": [{"type": "function_call_output", "call_id": "", "output": "x"}]},
         "input[0].call_id", "input[0].call_id: a message of the role tool needs"),
        ({"input": [USER, *[{"type": "function_call", "name": "a", "call_id": "b", "arguments": arguments}
                            for arguments in ("{}", '{"a":' * 200 + "1" + "}" * 200)], USER]},
         "input[2].arguments", "input[2].arguments is nested too deeply"),
        ({"text": {"format": {"type": "json_schema", "name": "a b", "schema": {}}}}, "text.format.name", "'a b'"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"type": 5}, "strict": True}}},
         "text.format.schema", "text.format.schema is not supported"),
        *(
            ({"tools": [WEATHER, NAMESPACE | {"tools": [PATCH | {"format": GRAMMAR | {"definition": bad}}]}],
              "tool_choice": "required"}, "tools[1].tools[0].format.definition",
             f"tools[1].tools[0].format.definition{text}")
            for bad, text in (("start: nothing", " is not supported"), ("start: @x", ": @ in"), ("x" * 65_537, ": the"))
        ),
    ],
)  # fmt: skip
def test_errors_name_the_fields_of_this_api(server: RunningServer, fields: Any, param: str, named: str) -> None:
    answer = server.post("/v1/responses", {"model": MODEL, "input": "x"} | fields, {"authorization": "Bearer key"})
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
    assert named in answer.error["message"]


def read(**fields: Any) -> Any:
    return chat_of(decode_request(msgspec.json.encode({"input": "x"} | fields), ResponsesRequest), {})[0]


BAD: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"other": 1}, "other"),
    ({"reasoning": {"effort": "much"}}, "reasoning.effort"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [WEATHER, {"type": "mcp", "server_label": "x"}]}, "tools[1].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].name"),
    ({"tools": [NAMESPACE | {"tools": [NAMESPACE]}]}, "tools[0].tools[0].type"),
    ({"tools": [WEATHER | {"defer_loading": True}]}, "tools[0].defer_loading"),
    (
        {"tools": [PATCH | {"format": GRAMMAR | {"syntax": "ebnf"}}]},
        "tools[0].format.syntax",
    ),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "patch"}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "web_search"}}, "tool_choice"),
    ({"input": [USER, {"type": "item_reference", "id": "msg_1"}]}, "input[1].type"),
    ({"input": [USER, {"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[1].call_id"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "person", "content": "x"}]}, "input[0].role"),
    ({"input": [{"content": "x"}]}, "input[0].type"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"type": "reasoning", "encrypted_content": "gAAA"}]}, "input[0].encrypted_content"),
]


@pytest.mark.parametrize(("change", "param"), BAD, ids=[str(change)[:50] for change, _ in BAD])
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(**change)
    assert (caught.value.status, caught.value.param) == (400, param)


NEUTRAL = {
    "background": False, "previous_response_id": None, "truncation": "disabled", "top_logprobs": 0, "store": False,
    "service_tier": "auto", "stream_options": {"include_obfuscation": True}, "max_tool_calls": 3,
    "metadata": {"a": "b"},
    "prompt_cache_key": "k", "safety_identifier": "s", "client_metadata": {"x": "y"}, "text": {"verbosity": "medium"},
    "include": ["web_search_call.action.sources"], "reasoning": {"summary": "auto"}, "tools": [],
}  # fmt: skip


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    chat = read(**NEUTRAL, user="u", max_output_tokens=5, parallel_tool_calls=False, temperature=0.5)
    assert (chat.user, chat.max_tokens, chat.parallel_tool_calls, chat.temperature) == ("u", 5, False, 0.5)
    assert (chat.tools, chat.response_format, chat.reasoning_effort) == (None, None, None)


def test_items_of_a_conversation_become_messages() -> None:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Use tools."}]},
        {"role": "user", "content": "go"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": write_reasoning("So ü.")},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Look.", "annotations": []}],
        },
        {"type": "function_call", "call_id": "a", "name": "get", "arguments": '{"x": 1}', "status": "completed"},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": '+"\n'},
        {"type": "custom_tool_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "ok"}]},
        {"type": "function_call_output", "call_id": "a", "output": "1"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Then"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": " more"}]},
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "developer", "content": "late"},
        {"type": "reasoning", "summary": []},
    ]
    messages = [
        {name: value for name, value in msgspec.to_builtins(message).items() if value is not None}
        for message in read(input=items, instructions="Be kind.").messages
    ]
    calls = [
        {"id": "a", "type": "function", "function": {"name": "get", "arguments": '{"x": 1}'}, "index": None},
        {
            "id": "b",
            "type": "function",
            "function": {"name": "patch", "arguments": '{"input":"+\\"\\n"}'},
            "index": None,
        },
    ]
    assert messages == [
        {"role": "system", "content": [{"type": "text", "text": text} for text in ("Be kind.", "Use tools.")]},
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "Look.", "reasoning_content": "So ü.", "tool_calls": calls},
        {"role": "tool", "content": "ok", "tool_call_id": "b"},
        {"role": "tool", "content": "1", "tool_call_id": "a"},
        {"role": "assistant", "content": "", "reasoning_content": "Then"},
        {"role": "assistant", "content": "one", "reasoning_content": " more"},
        {"role": "assistant", "content": "no"},
        {"role": "system", "content": [{"type": "text", "text": "late"}]},
        {"role": "assistant", "content": ""},
    ]


def test_tools_and_their_choice() -> None:
    chat = read(tools=[WEATHER, PATCH | {"format": GRAMMAR}], tool_choice={"type": "custom", "name": "patch"})
    weather, patch = (tool.function for tool in chat.tools)
    assert (weather.name, weather.strict, weather.parameters) == ("get_weather", None, WEATHER["parameters"])
    assert isinstance(patch, TextFunction)
    assert (patch.strict, patch.grammar) == (True, GRAMMAR["definition"])
    assert isinstance(chat.tool_choice, NamedTool)
    assert chat.tool_choice.function.name == "patch"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_weather"}]}
    chat = read(tools=TOOLS, tool_choice=allowed)
    assert (chat.tool_choice, [tool.function.name for tool in chat.tools]) == ("required", ["get_weather"])
    assert read(tools=TOOLS, tool_choice="none").tool_choice == "none"


def test_tools_of_a_namespace_are_called_by_both_names() -> None:
    body = {"input": "x", "tools": [WEATHER, NAMESPACE]}
    chat, called = chat_of(decode_request(msgspec.json.encode(body), ResponsesRequest), {})
    assert [tool.function.name for tool in chat.tools or ()] == ["get_weather", "far.get_weather", "far.patch"]
    assert chat.tools is not None
    assert chat.tools[1].function.description == "Other places.\nWeather of a place"
    assert called["far.get_weather"] == CalledTool("get_weather", "far")
    assert called["far.patch"] == CalledTool("patch", "far", is_custom=True)
    item = {"type": "function_call", "call_id": "a", "name": "get_weather", "namespace": "far", "arguments": "{}"}
    assert read(input=[item]).messages[0].tool_calls[0].function.name == "far.get_weather"


def test_the_form_of_the_text_is_a_response_format() -> None:
    form = {"type": "json_schema", "name": "place", "schema": {"type": "object"}, "strict": True}
    schema = read(text={"format": form}).response_format.json_schema
    assert (schema.name, schema.schema, schema.strict) == ("place", {"type": "object"}, True)
    assert type(read(text={"format": {"type": "json_object"}}).response_format).__name__ == "JsonObjectFormat"
    assert read(reasoning={"effort": "low"}).reasoning_effort == "low"


REQUEST: dict[str, Any] = {
    "input": [
        USER,
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}], "summary": []},
        {"type": "function_call", "call_id": "a", "name": "get_weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": [{"type": "input_text", "text": "y"}]},
        {"type": "custom_tool_call", "call_id": "b", "name": "patch", "input": "z"},
    ],
    "tools": [WEATHER, PATCH | {"format": GRAMMAR}, NAMESPACE],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "get_weather"}]},
    "text": {"format": {"type": "json_schema", "name": "s", "schema": {}}},
    "reasoning": {"effort": "low"},
    "include": [REASONING],
}  # fmt: skip
ODD: list[Any] = [None, True, 0, -1, 3.5, "", "x", [], {}, [None], ["x"], {"type": "function"}, {"type": "x"}, [[[]]]]


def mutated(value: Any, draw: random.Random) -> Any:
    """The same value with one odd part in some depth."""
    if draw.random() < 0.15 or not isinstance(value, dict | list) or not value:
        return draw.choice(ODD)
    if isinstance(value, list):
        at = draw.randrange(len(value))
        return [*value[:at], mutated(value[at], draw), *value[at + 1 :]]
    name = draw.choice(list(value))
    return value | {name: mutated(value[name], draw)}


def test_odd_requests_are_refused_by_name_or_understood() -> None:
    draw = random.Random(7)
    assert len(read(**REQUEST).messages) == 4
    statuses = []
    for _ in range(600):
        body = msgspec.json.encode(mutated(REQUEST, draw))
        try:
            chat_of(decode_request(body, ResponsesRequest), {})
            statuses.append(200)
        except RequestError as error:
            statuses.append(error.status)
    assert set(statuses) == {200, 400}
    assert len(statuses) == 600
