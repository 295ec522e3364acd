"""Responses to valid requests, in both forms, streamed and unstreamed."""

import json
import re
from collections.abc import Iterator

import pytest
from server_harness import MODEL, RunningServer, chat_body, scripted_server

from meltcore.serve.tasks.generation.responses import OBFUSCATED_BYTES

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
COMPLETION = {"model": MODEL, "prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server() as running:
        yield running
        running.check_no_leak()


def test_chat_answer_has_text_usage_and_reason(server: RunningServer) -> None:
    answer = server.chat("hello", max_tokens=7).json
    assert answer["object"] == "chat.completion"
    assert answer["model"] == MODEL
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "hellohe", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_streamed_text_is_the_whole_answer(server: RunningServer) -> None:
    answer = server.chat("héllo ☃", max_tokens=200, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    choices = [event["choices"][0] for event in answer.events]
    assert len(choices) > 5  # not in one event; a busy server sends the tokens of several steps together
    whole = server.chat("héllo ☃", max_tokens=200).json["choices"][0]["message"]["content"]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole
    assert choices[0]["delta"]["role"] == "assistant"
    assert all("role" not in choice["delta"] for choice in choices[1:])
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == "length"
    assert all("usage" not in event for event in answer.events)


def test_include_usage_adds_one_event_without_choices(server: RunningServer) -> None:
    events = server.chat("hi", max_tokens=5, stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 5
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    plain = server.chat("hi", max_tokens=5, stream=True, stream_options={"include_usage": False}).events
    assert all("usage" not in event for event in plain)


def test_continuous_usage_counts_up_to_the_whole(server: RunningServer) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    events = server.chat("☃", max_tokens=9, stream=True, stream_options=options).events
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-2:] == [9, 9]
    assert all(event["usage"]["prompt_tokens"] == 3 for event in events)


def test_obfuscated_events_have_lengths_of_whole_blocks(server: RunningServer) -> None:
    options = {"include_obfuscation": True, "include_usage": True}
    for path, prompt in (("/v1/chat/completions", chat_body("hé☃llo")), ("/v1/completions", COMPLETION)):
        answer = server.post(path, prompt | {"max_tokens": 30, "stream": True, "stream_options": options})
        lines = [line for line in answer.body.split(b"\n\n") if b"obfuscation" in line]
        # Without the field's own 18 bytes and the last brace.
        assert {(len(line) - 18) % OBFUSCATED_BYTES for line in lines} == {0}
        assert len(lines) == len(answer.events) - 1
        assert len({event["obfuscation"] for event in answer.events[:-1]}) == len(lines)
    plain = server.chat("hi", stream=True, max_tokens=3, stream_options={"include_obfuscation": False})
    assert b"obfuscation" not in plain.body


def test_final_message_is_continued(server: RunningServer) -> None:
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd "}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 7, "continue_final_message": True}
    assert server.post("/v1/chat/completions", body).json["choices"][0]["message"]["content"] == "abcd ab"
    for message, fault in (
        ({"role": "user", "content": "x"}, "must be a text of the assistant; it is one of the role user"),
        ({"role": "assistant", "tool_calls": [CALL]}, "of the role assistant with tool_calls"),
    ):
        answer = server.post("/v1/chat/completions", body | {"messages": [*messages, message]})
        assert (answer.status, answer.error["param"]) == (400, "continue_final_message")
        assert fault in answer.error["message"]


def test_stop_string_across_tokens_ends_the_answer_before_it(server: RunningServer) -> None:
    choice = server.chat("abcdef", max_tokens=100, stop=["def", "efab"]).json["choices"][0]
    assert choice["message"]["content"] == "abc"
    assert choice["finish_reason"] == "stop"
    found = server.check_no_leak()
    assert found["num_requests_running"] == 0


def test_stop_string_usage_counts_only_its_tokens(server: RunningServer) -> None:
    answer = server.chat("abcdef", max_tokens=100, stop="cd", include_stop_str_in_output=True).json
    assert answer["choices"][0]["message"]["content"] == "abcd"
    assert answer["usage"]["completion_tokens"] == 4


def test_stop_string_is_never_streamed_in_part(server: RunningServer) -> None:
    events = server.chat("abcdef", max_tokens=100, stop="def", stream=True).events
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == "abc"
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_stop_token_is_counted_but_not_shown(server: RunningServer) -> None:
    answer = server.chat("abc!", max_tokens=50, stop_token_ids=[ord("!")]).json
    assert answer["choices"][0]["message"]["content"] == "abc"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 4


@pytest.mark.slow
def test_default_max_tokens_is_what_the_context_leaves() -> None:
    with scripted_server("--step-s", "0", engine={"max_model_len": 64}) as server:
        usage = server.chat("hello").json["usage"]
        assert usage["total_tokens"] == 64
        server.check_no_leak()


def test_chat_logprobs_follow_openai(server: RunningServer) -> None:
    logprobs = server.chat("ab", max_tokens=2, logprobs=True, top_logprobs=3).json["choices"][0]["logprobs"]
    first = logprobs["content"][0]
    assert (first["token"], first["logprob"], first["bytes"]) == ("a", -0.5, [97])
    assert [entry["token"] for entry in first["top_logprobs"]] == ["a", " t300", " t301"]
    assert first["top_logprobs"][2]["logprob"] == -9999.0
    assert len(logprobs["content"]) == 2


def test_streamed_logprobs_hold_every_token_once(server: RunningServer) -> None:
    events = server.chat("☃x", max_tokens=8, logprobs=True, stream=True).events
    entries = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == "☃x☃x".encode()


def test_completion_logprobs_follow_openai(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": "ab", "max_tokens": 3, "logprobs": 2}
    logprobs = server.post("/v1/completions", body).json["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "a"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert logprobs["top_logprobs"][1] == {"b": -0.5, " t300": -1.5}


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["aba"]),
        (["ab", "xyz"], ["aba", "xyz"]),
        ([97, 98], ["aba"]),
        ([[97], [98, 99]], ["aaa", "bcb"]),
    ],
)
def test_completion_takes_every_form_of_prompt(server: RunningServer, prompt: object, texts: list[str]) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 3}
    answer = server.post("/v1/completions", body).json
    assert [choice["text"] for choice in answer["choices"]] == texts
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))
    streamed = [""] * len(texts)
    for event in server.post("/v1/completions", body | {"stream": True}).events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts


def test_content_parts_and_developer_role_are_joined(server: RunningServer) -> None:
    parts = [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    answer = server.post("/v1/chat/completions", {"model": MODEL, "messages": messages, "max_tokens": 5})
    assert answer.json["choices"][0]["message"]["content"] == "xab\nc"


def test_null_means_absent_and_neutral_values_pass(server: RunningServer) -> None:
    neutral = {"n": 1, "tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "logit_bias": {}}
    neutral |= {"verbosity": "medium", "length_penalty": 1.0, "use_beam_search": False, "include_reasoning": True}
    absent = {"temperature": None, "stop": None, "seed": None, "stream": None, "max_completion_tokens": None}
    assert server.chat("ab", max_tokens=2, **neutral, **absent).status == 200


def test_fields_without_effect_are_accepted(server: RunningServer) -> None:
    unused = {
        "metadata": {"run": "7"},
        "store": True,
        "user": "me",
        "safety_identifier": "me",
        "prompt_cache_key": "key",
        "prompt_cache_retention": "24h",
        "prompt_cache_options": {"mode": "explicit"},
    }
    messages = [{"role": "user", "content": "ab", "name": "Ann"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 2, "prediction": {"type": "content", "content": "x"}}
    answer = server.post("/v1/chat/completions", body | unused)
    assert answer.json["choices"][0]["message"]["content"] == "ab"
    answer = server.post("/v1/completions", {"model": MODEL, "prompt": "ab", "max_tokens": 2, **unused})
    assert answer.json["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("prompt", ["ab☃", [97, 98, *"☃".encode()]], ids=["text", "token ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_echo_with_logprobs_follows_the_legacy_openai_form(
    server: RunningServer, prompt: str | list[int], max_tokens: int
) -> None:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    answer = server.post("/v1/completions", body).json
    choice, logprobs = answer["choices"][0], answer["choices"][0]["logprobs"]
    assert choice["text"] == "ab☃" + "ab"[:max_tokens]
    assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["usage"]["prompt_tokens"] == 5
    assert logprobs["tokens"] == ["a", "b", r"bytes:\xe2", r"bytes:\x98", r"bytes:\x83", *"ab"[:max_tokens]]
    assert logprobs["token_logprobs"] == [None, *[-0.25] * 4, *[-0.5] * max_tokens]
    assert logprobs["top_logprobs"][:2] == [None, {"b": -0.25}]
    assert len(logprobs["top_logprobs"]) == 5 + max_tokens
    assert logprobs["text_offset"] == [0, 1, 2, 2, 2, 3, 4][: 5 + max_tokens]  # the snowman is three tokens


def test_streamed_echo_begins_with_the_prompt(server: RunningServer) -> None:
    body = {"model": MODEL, "prompt": ["ab", "xyz"], "max_tokens": 2, "echo": True}
    texts = ["abab", "xyzxy"]
    assert [choice["text"] for choice in server.post("/v1/completions", body).json["choices"]] == texts
    streamed = ["", ""]
    for event in server.post("/v1/completions", body | {"stream": True}).events:
        for choice in event["choices"]:
            streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    only = server.post("/v1/completions", body | {"max_tokens": 0, "stream": True}).events
    assert [event["choices"][0]["text"] for event in only] == ["ab", "xyz"]
    long = {"model": MODEL, "prompt": [[97] * 4000] * 100, "max_tokens": 1, "stream": True, "echo": True}
    assert len(server.post("/v1/completions", long).events) >= 100  # none of it is a reader that is too slow


def test_request_id_is_echoed(server: RunningServer) -> None:
    answer = server.post("/v1/chat/completions", chat_body(max_tokens=1), {"x-request-id": "my-id-7"})
    assert answer.headers["x-request-id"] == "my-id-7"
    assert answer.json["id"] == "chatcmpl-my-id-7"


@pytest.mark.slow
def test_one_log_line_per_request_without_its_text() -> None:
    with scripted_server(log_format="json") as server:
        headers = {"x-request-id": "logged"}
        server.post("/v1/chat/completions", chat_body("secret words", max_tokens=3, user="u1"), headers)
        server.check_no_leak()
        server.signal()
        assert server.wait_exit() == 0
        lines = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
        (line,) = [line for line in lines if line["event"] == "request"]
        assert "secret" not in server.stderr
        assert (line["request_id"], line["status"], line["finish_reason"]) == ("logged", 200, "length")
        assert (line["prompt_tokens"], line["completion_tokens"], line["user"]) == (12, 3, "u1")


def test_models_route_lists_the_served_model(server: RunningServer) -> None:
    (card,) = server.request("GET", "/v1/models").json["data"]
    assert card["id"] == MODEL
    assert (card["owned_by"], card["weights"], card["tokenizer"]) == ("meltcore", "dummy", "synthetic")
    assert (card["task"], card["max_model_len"], card["priority"]) == ("generation", 4096, "standard")
    assert (card["weight_dtypes"], card["kv_cache_dtype"], card["speculative_decoding"]) == (
        ["float32"],
        "float32",
        "none",
    )
    assert card["hf_overrides"] == {}
    assert server.request("GET", f"/v1/models/{MODEL}").json == card


@pytest.mark.slow
def test_models_route_states_overrides() -> None:
    overrides = {"rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    with scripted_server(engine={"hf_overrides": overrides}) as server:
        (card,) = server.request("GET", "/v1/models").json["data"]
        assert card["hf_overrides"] == overrides
        server.signal()
        assert server.wait_exit() == 0
        assert server.process.stdout is not None
        assert f", overrides {json.dumps(overrides)}]" in server.process.stdout.read()


@pytest.mark.slow
def test_every_served_name_is_accepted() -> None:
    with scripted_server(names=("one", "org/two")) as server:
        assert [card["id"] for card in server.request("GET", "/v1/models").json["data"]] == ["one", "org/two"]
        assert server.request("GET", "/v1/models/org/two").status == 200
        for name in ("one", "org/two"):
            answer = server.chat("x", max_tokens=1, model=name)
            assert answer.json["model"] == name
        error = server.chat("x", model="three")
        assert error.status == 404
        assert "one, org/two" in error.error["message"]


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"prompt": "hé"}).json
    assert tokens["tokens"] == [104, 195, 169]
    assert tokens["count"] == 3
    assert server.post("/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "hé"}
    chat = server.post("/tokenize", {"messages": [{"role": "user", "content": "ab"}]})
    assert chat.json["tokens"] == [97, 98]


@pytest.mark.slow
def test_profile_routes_exist_only_with_a_folder(server: RunningServer, tmp_path: object) -> None:
    assert server.post("/start_profile", {}).status == 404
    with scripted_server(profile_dir=str(tmp_path)) as profiled:
        assert profiled.post("/start_profile", {}).json == {"path": str(tmp_path)}
        assert profiled.post("/stop_profile", {}).status == 200


@pytest.mark.slow
def test_cuda_profiler_needs_no_folder() -> None:
    with scripted_server(profiler="cuda") as profiled:
        assert [profiled.post(f"/{each}_profile", {}).json for each in ("start", "stop")] == [{"path": "cuda"}] * 2


@pytest.mark.slow
def test_cors_is_off_by_default(server: RunningServer) -> None:
    origin = {"origin": "https://app.example"}
    assert "access-control-allow-origin" not in server.request("GET", "/v1/models", headers=origin).headers
    with scripted_server(allowed_origins=("https://app.example",)) as open_server:
        allowed = open_server.request("GET", "/v1/models", headers=origin).headers
        assert allowed["access-control-allow-origin"] == "https://app.example"
        other = open_server.request("GET", "/v1/models", headers={"origin": "https://evil.example"}).headers
        assert "access-control-allow-origin" not in other
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
        for name, status in (("https://app.example", 200), ("https://evil.example", 400)):
            answer = open_server.request("OPTIONS", "/v1/completions", headers={"origin": name, **asks})
            assert (answer.status, "access-control-allow-origin" in answer.headers) == (status, status == 200)
        assert open_server.post("/v1/completions", COMPLETION, origin).status == 200


@pytest.mark.slow
def test_pages_of_other_sites_are_refused_on_every_route(server: RunningServer) -> None:
    own = f"127.0.0.1:{server.port}"
    for path, body in (("/v1/completions", COMPLETION), ("/tokenize", {"prompt": "a"}), ("/v1/chat", {"text": "a"})):
        for headers, code in (
            ({"origin": "https://evil.example"}, "origin_not_allowed"),
            ({"origin": "null", "content-type": "text/plain"}, "origin_not_allowed"),
            ({"host": "evil.example", "origin": "http://evil.example"}, "host_not_allowed"),
        ):
            refused = server.post(path, body, headers)
            assert (refused.status, refused.error["code"], refused.error["type"]) == (403, code, "permission_error")
        assert server.post(path, body, {"origin": f"http://{own}"}).status != 403, "the page at / may"
    for path in ("/", "/docs", "/health", "/metrics", "/v1/models", "/none"):
        assert server.request("GET", path, headers={"host": "evil.example"}).status == 403
        assert server.request("GET", path, headers={"host": "localhost:1"}).status == (404 if path == "/none" else 200)
    assert server.request("OPTIONS", "/v1/completions", headers={"origin": "https://evil.example"}).status == 405


@pytest.mark.slow
def test_banner_lists_the_model_and_its_memory_table() -> None:
    with scripted_server("--load-s", "0.6", engine={"enforce_eager": True}) as server:
        assert server.url == f"http://127.0.0.1:{server.port}"
        server.signal()
        assert server.wait_exit() == 0
        assert server.process.stdout is not None
        banner = server.process.stdout.read()
        assert "ready: scripted on CPU in float32 [dummy weights, synthetic tokenizer, debug --enforce-eager]" in banner
        assert "KV pages" in banner
        assert "1 MiB" in banner
        assert re.fullmatch(r"meltcore: loading: \w+( \(\d+%\))? after \d\.\d s\n", server.stderr.partition("time=")[0])
