"""Responses to invalid requests: OpenAI's error form with field, limit and value; the engine is unaffected."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from server_harness import MODEL, RunningServer, chat_body, scripted_server
from waiting import WAIT_S

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    with scripted_server(engine={"max_model_len": 100}) as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server, checked after each test: no request accepted, none open."""
    before = shared_server.metrics()["requests_accepted_total"]
    yield shared_server
    assert shared_server.check_no_leak()["requests_accepted_total"] == before
    assert shared_server.process.poll() is None


def schema_format(schema: object, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, **fields}}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"model": "scripted", "messages": [], "temperature": NaN}',
        b'{"model": "scripted", "messages": [], "temperature": 1e999}',
        b'{"model": "scripted", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "scripted", "messages": [], "metadata": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=["empty", "cut", "array", "string", "not-utf8", "nan", "huge-number", "surrogate", "deep"],
)
def test_body_that_is_not_a_json_object_is_400(server: RunningServer, body: bytes) -> None:
    answer = server.post(CHAT, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": 7}, "model"),
        ({"messages": "hello"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "tool", "content": None, "tool_call_id": "a"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": 7}]}, "messages[0].name"),
        ({"metadata": {"run": 7}}, "metadata[...]"),
        ({"metadata": "x"}, "metadata"),
        ({"store": "yes"}, "store"),
        ({"user": 7}, "user"),
        ({"safety_identifier": 7}, "safety_identifier"),
        ({"prompt_cache_key": ["a"]}, "prompt_cache_key"),
        ({"prompt_cache_retention": 24}, "prompt_cache_retention"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": ""}]}, "messages"),
        ({"messages": [{"role": "user", "content": "boom"}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 96}, "max_tokens"),
        ({"max_completion_tokens": 10**30}, "max_completion_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"min_tokens": 10**400}, "min_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"temperature": 1e-40}, "temperature"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"top_k": 2**64}, "top_k"),
        ({"top_k": 10**400}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e-40}, "repetition_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"seed": -(10**400)}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
        ({"stop_token_ids": [1] * 257}, "stop_token_ids"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"priority": 2**40}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"bogus": 1}}, "stream_options.bogus"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "a", "reasoning_content": 1}]}, "messages[0].reasoning_content"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": True}, "n"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]},
            "tools[0].function.parameters.properties",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"reasoning_effort": "utmost"}, "reasoning_effort"),
        ({"functions": [{}]}, "functions"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": schema_format([])}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"type": "objet"})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"uniqueItems": True}, strict=True)}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({"enum": ["x" * 2**21]})}, "response_format.json_schema.schema"),
        ({"response_format": schema_format({}, name="a b")}, "response_format.json_schema.name"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 2, "max_tokens": 3}, "min_tokens"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
        (
            {
                "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "{"}],
                "response_format": {"type": "json_object"},
                "continue_final_message": True,
            },
            "continue_final_message",
        ),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "start: missing"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"structural_tag": {"format": {}}}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"guided_regex": "a"}, "guided_regex"),
        ({"logit_bias": {"512": 1}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[...]"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"verbosity": "low"}, "verbosity"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"never_heard_of": 1}, "never_heard_of"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_bad_chat_field_is_a_400_that_names_it(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post(CHAT, chat_body("hello") | fields)
    assert answer.status == 400
    assert answer.error["param"] == param
    assert answer.error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["x"] * 1025}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [512]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1, "a"]]}, "prompt[0][1]"),
        ({"prompt": {"text": "a"}}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": 10**400}, "logprobs"),
        ({"best_of": 0}, "best_of"),
        ({"best_of": "2"}, "best_of"),
        ({"echo": "yes"}, "echo"),
        ({"echo": True, "logprobs": 1, "stream": True}, "echo"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": False, "max_tokens": 0}, "max_tokens"),
        ({"suffix": "z"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
def test_bad_completion_field_is_a_400_that_names_it(server: RunningServer, fields: dict[str, Any], param: str) -> None:
    answer = server.post(COMPLETIONS, {"model": MODEL, "prompt": "a"} | fields)
    assert answer.status == 400
    assert answer.error["param"] == param


def test_prompt_longer_than_the_context_names_both_lengths(server: RunningServer) -> None:
    error = server.chat("x" * 150).error
    assert error["code"] == "context_length_exceeded"
    assert "150" in error["message"]
    assert "maximum context length is 100 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat_body("x" * 50_000), "messages"),
        (COMPLETIONS, {"model": MODEL, "prompt": ["x", "x" * 50_000]}, "prompt"),
    ],
    ids=["chat", "completion"],
)
def test_only_the_prefix_of_a_far_too_long_prompt_is_tokenized(
    server: RunningServer, path: str, body: dict[str, Any], param: str
) -> None:
    error = server.post(path, body).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "the first 16384 of this prompt's 500" in error["message"]
    assert "maximum context length is 100 tokens, so a prompt may have at most 99" in error["message"]
    assert error["message"].endswith("16384 tokens already")


def test_too_many_max_tokens_name_limit_and_value(server: RunningServer) -> None:
    error = server.chat("hello", max_tokens=96).error
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 100 tokens" in error["message"]
    assert all(number in error["message"] for number in ("96", "5", "101", "95"))


def test_template_error_is_a_400_with_its_message(server: RunningServer) -> None:
    assert "no booms" in server.chat("boom").error["message"]


def test_missing_field_is_named(server: RunningServer) -> None:
    answer = server.post(CHAT, {"model": MODEL})
    assert (answer.status, answer.error["param"]) == (400, "messages")


def test_unknown_model_is_404_with_the_known_names(server: RunningServer) -> None:
    answer = server.chat("x", model="gpt-9")
    assert (answer.status, answer.error["param"], answer.error["code"]) == (404, "model", "model_not_found")
    assert MODEL in answer.error["message"]


@pytest.mark.parametrize(
    "fields",
    [{"model": "m" * 2**20}, {"x" * 2**20: 1}, {"messages": [{"role": "r" * 2**20, "content": ""}]}],
    ids=["model", "field", "role"],
)
def test_error_message_truncates_client_input(server: RunningServer, fields: dict[str, Any]) -> None:
    answer = server.chat("x", **fields)
    assert answer.status in (400, 404)
    assert len(answer.body) < 4096
    assert server.request("GET", "/v1/models/" + "m" * 30_000).status == 404
    assert len(server.request("GET", "/v1/models/" + "m" * 30_000).body) < 4096
    assert len(server.request("GET", "/v2/" + "m" * 30_000).body) < 4096


def test_unknown_path_and_method_are_in_openai_form(server: RunningServer) -> None:
    assert server.request("GET", "/v2/nothing").error["type"] == "not_found_error"
    assert server.request("GET", CHAT).status == 405
    assert server.request("GET", CHAT).error["message"]


def test_detokenize_refuses_ids_outside_the_vocabulary(server: RunningServer) -> None:
    assert server.post("/detokenize", {"tokens": [512]}).error["param"] == "tokens"
    assert server.post("/tokenize", {"prompt": "a", "messages": []}).status == 400
    assert server.post("/tokenize", {}).status == 400


@pytest.fixture(scope="module")
def locked_server() -> Iterator[RunningServer]:
    with scripted_server(api_key="right", max_body_bytes=2000) as running:
        yield running
        running.check_no_leak()


@pytest.mark.parametrize("header", [None, "Bearer wrong", "Basic right", "right", "Bearer"])
def test_invalid_or_missing_key_is_401(locked_server: RunningServer, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header}
    answer = locked_server.post(CHAT, chat_body(max_tokens=1), headers)
    assert answer.status == 401
    assert answer.error["type"] == "authentication_error"
    for path in ("/v1/models", "/v1/models/scripted"):
        assert locked_server.request("GET", path, headers=headers).status == 401
    assert locked_server.post("/tokenize", {"prompt": "x"}, headers).status == 401


def test_valid_key_is_accepted_and_health_routes_need_none(locked_server: RunningServer) -> None:
    headers = {"authorization": "Bearer right"}
    assert locked_server.post(CHAT, chat_body(max_tokens=1), headers).status == 200
    for path in ("/", "/docs", "/openapi.json", "/health", "/live"):
        assert locked_server.request("GET", path).status == 200
    for path in ("/metrics", "/v1/status"):
        assert locked_server.request("GET", path).status == 401
        assert locked_server.request("GET", path, headers=headers).status == 200


def test_huge_body_is_413(locked_server: RunningServer) -> None:
    answer = locked_server.post(CHAT, chat_body("x" * 3000), {"authorization": "Bearer right"})
    assert answer.status == 413
    assert "2,000 bytes" in answer.error["message"]


# threat: a client: a body above the limit is 413 before it is read whole
@pytest.mark.slow
def test_huge_chunked_body_is_413_too(locked_server: RunningServer) -> None:
    data = json.dumps(chat_body("x" * 5_000_000)).encode()
    with socket.create_connection(("127.0.0.1", locked_server.port), timeout=WAIT_S) as connection:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer right\r\n"
        head += "transfer-encoding: chunked\r\n\r\n"
        connection.sendall(head.encode() + b"%x\r\n" % len(data) + data + b"\r\n0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


@pytest.mark.slow
def test_chat_without_a_usable_template_is_400_and_completions_work(tmp_path: Any) -> None:
    from server_harness import make_model

    folder = make_model(tmp_path / "bare", template=False)
    with scripted_server(engine={"checkpoint": str(folder)}) as server:
        error = server.chat("x").error["message"]
        assert "no chat template" in error
        assert "--chat-template FILE" in error
        assert server.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 1}).status == 200
        assert server.request("GET", "/v1/models").json["data"][0]["chat"] is False
        refused = server.post("/v1/chat_direct", {"prompt": "x", "model": MODEL})
        assert (refused.status, "--chat-template FILE" in refused.error["message"]) == (400, True)
        server.check_no_leak()
    (folder / "chat_template.jinja").write_text("{{ messages | from_json }}")
    with scripted_server(engine={"checkpoint": str(folder)}) as server:
        assert "error in line 1: No filter named 'from_json'" in server.chat("x").error["message"]
        assert server.post(COMPLETIONS, {"model": MODEL, "prompt": "x", "max_tokens": 1}).status == 200


@pytest.mark.slow
def test_named_template_is_used_and_special_tokens_in_messages_are_text(tmp_path: Any) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for m in messages %}{{ '<|im_start|>' + m.content + '<|im_end|>' }}{% endfor %}")
    messages = [{"role": "user", "content": [{"type": "text", "text": "a<|im_end|>"}, {"type": "text", "text": "b"}]}]
    counts = []
    for flag in (False, True):
        engine = {"checkpoint": "meltcore/sums", "chat_template": str(template), "special_tokens_in_messages": flag}
        with scripted_server(engine=engine) as server:
            tokens = server.post("/tokenize", {"model": MODEL, "messages": messages}).json["tokens"]
            text = server.post("/detokenize", {"model": MODEL, "tokens": tokens}).json["prompt"]
            assert text == "<|im_start|>a<|im_end|>\nb<|im_end|>"
            counts.append((tokens[0], tokens.count(2)))
            card = server.request("GET", "/v1/models").json["data"][0]
            assert (card["chat"], card["special_tokens_in_messages"]) == (True, flag)
    assert counts == [(1, 1), (1, 2)]
