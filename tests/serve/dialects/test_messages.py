"""Anthropic's /v1/messages through its client and over plain HTTP. The scripted engine repeats the prompt."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from server_harness import MODEL, RunningServer, scripted_server
from waiting import WAIT_S

from meltcore.common.errors import RequestError
from meltcore.serve.dialects.messages import CountRequest, InputMessage, MessagesRequest, ToolResultBlock, chat_of
from meltcore.serve.requests.asgi import error_json
from meltcore.serve.requests.protocol import decode_request

pytestmark = pytest.mark.slow

USER = {"role": "user", "content": "x"}
END = "~"  # ends the scripted answer
# It writes roles and texts, calls and results, and last the last message alone, which the engine repeats first.
TEMPLATE = "{# tools <tool_call> #}{{ messages[-1].content }}"
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "Weather of a place",
        "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
        "cache_control": {"type": "ephemeral"},
    },
    {"name": "ping", "type": "custom", "input_schema": {"type": "object"}},
]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
EMPTY = '<tool_call>\n{"name": "ping", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    template = tmp_path_factory.mktemp("template") / "tools.jinja"
    template.write_text(TEMPLATE)
    settings = {"chat_template": str(template), "max_model_len": 2000}
    with scripted_server("--tokens-per-step", "3", engine=settings, api_key="key") as running:
        yield running
        running.check_no_leak()


@pytest.fixture
def client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="key", timeout=WAIT_S, max_retries=0) as made:
        yield made


def fields(written: str, **others: Any) -> dict[str, Any]:
    asked = {"model": MODEL, "max_tokens": 200, "messages": [{"role": "user", "content": written + END}]}
    return asked | {"stop_sequences": [END]} | others


def test_a_whole_answer(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**fields("hello"))
    assert (message.type, message.role, message.model, message.stop_reason) == (
        *("message", "assistant", MODEL),
        "stop_sequence",
    )
    assert message.stop_sequence == END
    assert [block.model_dump(exclude_none=True) for block in message.content] == [{"type": "text", "text": "hello"}]
    assert (message.usage.input_tokens, message.usage.output_tokens) == (6, 6)
    cut = client.messages.create(
        **fields("hello", max_tokens=2, system="s", extra_body={"temperature": 0.5, "top_k": 3, "top_p": 0.9})
    )
    assert (cut.stop_reason, cut.content[0].text) == ("max_tokens", "he")


def test_calls_of_an_answer_and_their_results(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**fields(f"Look.{CALL}{EMPTY}", tools=TOOLS))
    text, weather, ping = message.content
    assert (text.type, text.text, message.stop_reason) == ("text", "Look.", "tool_use")
    assert (weather.name, weather.input, ping.name, ping.input) == ("get_weather", {"place": "Bonn"}, "ping", {})
    assert weather.id != ping.id
    results: Any = [
        {"type": "tool_result", "tool_use_id": weather.id, "content": [{"type": "text", "text": "12"}]},
        {"type": "tool_result", "tool_use_id": ping.id, "is_error": True},
        {"type": "text", "text": "and now?" + END, "cache_control": {"type": "ephemeral"}},
    ]
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": results},
    ]
    for known in (history, [*history[:2], {"role": "user", "content": results[2:]}], history[2:]):
        assert client.messages.create(**fields("", messages=known, tools=TOOLS)).content[0].text == "and now?"


@pytest.mark.parametrize("written", ["hello", CALL, f"Look.{CALL}{EMPTY}", f"{CALL[:-20]}oh</tool_call>"])
def test_a_stream_joins_to_the_whole_answer(client: anthropic.Anthropic, written: str) -> None:
    whole = client.messages.create(**fields(written, tools=TOOLS))
    with client.messages.stream(**fields(written, tools=TOOLS)) as stream:
        kinds = [event.type for event in stream]
        joined = stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == len(whole.content)

    def shown(message: Any) -> list[Any]:
        blocks = [block.model_dump(exclude={"id", "citations"}, exclude_none=True) for block in message.content]
        return [blocks, message.stop_reason, message.stop_sequence, message.usage.output_tokens]

    assert shown(joined) == shown(whole)


def test_a_cut_call_has_its_complete_members(client: anthropic.Anthropic) -> None:
    written = '<tool_call>\n{"name": "get_weather", "arguments": {"place": "Bonn", "day": "Mon'
    asked = fields(written + "day", tools=TOOLS, max_tokens=len(written))
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        started = next(event.message.usage for event in stream if event.type == "message_start")
        joined = stream.get_final_message()
    for message in (whole, joined):
        assert (message.stop_reason, message.content[-1].input) == ("max_tokens", {"place": "Bonn"})
        usage = message.usage
        assert started.input_tokens == usage.input_tokens
        assert started.cache_read_input_tokens == usage.cache_read_input_tokens


def test_system_messages_and_edits_that_keep_all_are_accepted(client: anthropic.Anthropic) -> None:
    """Agents send them."""
    messages: Any = [
        {"role": "user", "content": "x"},
        {"role": "system", "content": [{"type": "text", "text": "now" + END}]},
    ]
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    message = client.messages.create(**fields("", messages=messages, extra_body={"context_management": edits}))
    assert message.content[0].text == "now"


def test_chats_continue_a_last_message_of_the_assistant_and_see_failed_results() -> None:
    messages = [InputMessage("user", "x"), InputMessage("assistant", "He")]
    assert chat_of(CountRequest(messages=messages), {}).continue_final_message
    assert not chat_of(CountRequest(messages=messages[:1]), {}).continue_final_message
    failed = ToolResultBlock(tool_use_id="a", content="no such file", is_error=True)
    [message] = chat_of(CountRequest(messages=[InputMessage("user", [failed])]), {}).messages
    assert message.content == "Error: no such file"


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (413, "request_too_large"), (500, "api_error"), (503, "overloaded_error")],
)
def test_errors_have_the_types_of_the_api(status: int, kind: str) -> None:
    error = json.loads(error_json(RequestError("lost", status=status), "anthropic"))
    assert (error["type"], error["error"]["type"]) == ("error", kind)


def test_tokens_are_counted(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "hello"}])
    assert counted.input_tokens == 5


ASSISTANT = {"role": "assistant", "content": "He"}
USES: list[Any] = [{"type": "text", "text": "x"}, {"type": "tool_use", "id": "a", "name": "ping", "input": {}}]
RESULTS: list[Any] = [{"type": "text", "text": "x"}, {"type": "tool_result", "tool_use_id": ""}]
DEEP: dict[str, Any] = {}
for _ in range(200):
    DEEP = {"a": DEEP}
# A chat has another form and other indices, such as of messages after a system prompt.
NAMED: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": [USER, ASSISTANT], "tools": TOOLS, "tool_choice": {"type": "any"}}, "messages",
     "a last message of the assistant in messages is not possible beside tool_choice, whose"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name", "tool_choice: 'x' is none"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name", "tools[0].name must be"),
    ({"tools": [*TOOLS, {"name": "a", "input_schema": {"type": "string"}}]}, "tools[2].input_schema",
     "tools[2].input_schema must be the schema of an object"),
    ({"tools": [{"name": "a", "input_schema": {"properties": 3}}]}, "tools[0].input_schema.properties",
     "tools[0].input_schema.properties must be"),
    ({"tools": [{"name": "a", "input_schema": {"properties": DEEP}}]}, "tools[0].input_schema", "is nested too deeply"),
    ({"tools": [{"name": "stop", "input_schema": {}}] * 2}, "tools", "two functions have the name 'stop'"),
    ({"system": "s", "messages": [USER, {"role": "user", "content": RESULTS}]}, "messages[1].content[1].tool_use_id",
     "messages[1].content[1].tool_use_id: a message of the role tool needs"),
    ({"system": "s", "messages": [{"role": "assistant", "content": [USES[0], USES[1] | {"input": DEEP}]}, USER]},
     "messages[0].content[1].input", "messages[0].content[1].input is nested too deeply"),
    ({"stop": ["x"]}, "stop", "stop: this field is not known here"),
    ({"max_completion_tokens": 5}, "max_completion_tokens", "max_completion_tokens: this field is not known here"),
    ({"stop_sequences": ["x" * 5000]}, "stop_sequences", "stop_sequences"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "param", "named"), NAMED, ids=[f"{param}-{text[-9:]}" for _, param, text in NAMED])
def test_errors_name_the_fields_of_this_api(
    server: RunningServer, change: dict[str, Any], param: str, named: str
) -> None:
    answer = server.post("/v1/messages", fields("x") | change, {"x-api-key": "key"})
    assert (answer.status, answer.error["param"]) == (400, param), answer.error
    assert named in answer.error["message"]


@pytest.mark.parametrize(
    "change",
    [{"tool_choice": {"type": "x"}}, {"thinking": {"type": "x"}}, {"output_config": {"format": {"type": "x"}}},
     {"messages": [{"role": "user", "content": [{"type": "x"}]}]}],
)  # fmt: skip
def test_unknown_types_are_not_compared_with_the_types_of_chats(change: dict[str, Any]) -> None:
    body = {"max_tokens": 5, "messages": [], **change}
    body["output_config"] = (
        {"format": {"schema": {}} | body["output_config"]["format"]} if "output_config" in body else None
    )
    with pytest.raises(RequestError, match="'x'") as caught:
        decode_request(json.dumps(body).encode(), MessagesRequest)
    assert "known is" not in caught.value.message
    assert "is known" not in caught.value.message


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role: Invalid enum value 'tool'"),
    ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
    ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}]}, "only text"),
    ({"messages": [{"role": "assistant", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "tool_result"),
    ({"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}, "only text belongs"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "clear_tool_uses_20250919"),
    ({"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": 2}]}}, "unless it keeps all"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search_20250305"),
    ({"tools": [*TOOLS, TOOLS[0]]}, "get_weather"),
    ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, "other"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"thinking": {"type": "enabled", "budget_tokens": 5}}, "thinking.budget_tokens: this model does not reason"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 5}}}}, "output_config.format.schema is"),
    ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
    ({"tools": [{"name": "a b", "input_schema": {}}]}, "a b"),
    ({"container": "x"}, "container"),
    ({"thinking": {"type": "enabled", "budget_tokens": 201}}, "thinking.budget_tokens is 201; it must be at most"),
    ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens is needed with type enabled"),
    ({"output_config": {"effort": "banana"}}, "output_config.effort: Invalid enum value 'banana'"),
]


@pytest.mark.parametrize(("change", "named"), BAD, ids=[str(change)[:40] for change, _ in BAD])
def test_bad_requests_are_named_in_the_form_of_the_api(
    server: RunningServer, change: dict[str, Any], named: str
) -> None:
    body = {name: value for name, value in (fields("x") | change).items() if value is not None}
    answer = server.post("/v1/messages", body, {"x-api-key": "key"})
    assert (answer.status, answer.json["type"], answer.json["error"]["type"]) == (400, "error", "invalid_request_error")
    assert named in answer.error["message"]


def test_wrong_keys_and_models_are_errors_of_the_client(server: RunningServer, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="there is no model 'other' here"):
        client.messages.create(**fields("x", model="other"))
    stranger = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**fields("x"))


@pytest.mark.parametrize(
    ("method", "path", "key", "status", "kind"),
    [
        ("POST", "/v1/messages", "wrong", 401, "authentication_error"),
        ("POST", "/v1/messages/count_tokens", "wrong", 401, "authentication_error"),
        ("POST", "/v1/messages/batches", "key", 404, "not_found_error"),
        ("GET", "/v1/messages", "key", 405, "invalid_request_error"),
        ("POST", "/v1/messages", "key", 413, "request_too_large"),
    ],
)
def test_refusals_before_the_endpoint_have_the_form_of_the_api(
    server: RunningServer, method: str, path: str, key: str, status: int, kind: str
) -> None:
    headers = {"x-api-key": key, "x-request-id": f"own-{status}"}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    with contextlib.closing(connection):
        if status == 413:  # only said: the body need not come
            headers |= {"content-length": str(2**40), "expect": "100-continue"}
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        body = json.loads(answer.read())
    assert (answer.status, body["type"], body["error"]["type"]) == (status, "error", kind)
    names = [answer.getheader("request-id"), answer.getheader("x-request-id"), body["request_id"]]
    assert names == [f"own-{status}"] * 3


def test_answers_name_their_request(client: anthropic.Anthropic) -> None:
    message = client.messages.create(**fields("hello", extra_headers={"x-request-id": "mine"}))
    assert (message._request_id, message.id) == ("mine", "msg_mine")
