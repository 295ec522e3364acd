"""A server with the real engine and the bundled model: behavior that the scripted engine cannot show."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from server_harness import RunningServer, read_daemon_url, running
from waiting import WAIT_S, wait_until

from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL

pytestmark = pytest.mark.slow
MELTCORE = [sys.executable, "-m", "meltcore.cli.main"]
SERVE = [*MELTCORE, "serve", BUNDLED_MODEL, "--port", "0", "--device", "cpu", "--memory", "128MiB"]
QUESTION = [{"role": "user", "content": "What is 7 * 8?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running([*SERVE, "--enable-auto-tool-choice"], tmp_path_factory.mktemp("serve") / "stderr") as server:
        server.wait_healthy(WAIT_S)
        yield server
        server.check_no_leak()


@pytest.fixture(scope="module")
def tool_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server with a parser of tool calls and little memory."""
    folder = tmp_path_factory.mktemp("tools")
    template = folder / "tools.jinja"
    template.write_text("{# tools #}{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}")
    command = [*SERVE, "--memory", "18MiB", "--chat-template", str(template), "--tool-call-parser", request.param]
    with running(command, folder / "stderr") as server:
        server.wait_healthy(WAIT_S)
        yield server


def test_answer_is_correct_streamed_and_unstreamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model=BUNDLED_MODEL, messages=QUESTION)
    assert "56" in (whole.choices[0].message.content or "")
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(
        client.chat.completions.create(
            model=BUNDLED_MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_a_flag_of_vllm_is_noted_as_not_needed(server: RunningServer) -> None:
    assert "--enable-auto-tool-choice is not needed: tools are always taken" in server.stderr


def test_length_stop_strings_and_seeds(client: openai.OpenAI) -> None:
    cut = client.chat.completions.create(model=BUNDLED_MODEL, messages=QUESTION, max_tokens=2)
    assert cut.choices[0].finish_reason == "length"
    assert cut.usage is not None
    assert cut.usage.completion_tokens == 2
    stopped = client.chat.completions.create(model=BUNDLED_MODEL, messages=QUESTION, stop=["wer is"])
    assert stopped.choices[0].message.content == "The ans"
    texts = [
        client.chat.completions.create(
            model=BUNDLED_MODEL, messages=QUESTION, temperature=1.5, seed=seed, max_tokens=30
        )
        .choices[0]
        .message.content
        for seed in (1, 1)
    ]
    assert texts[0] == texts[1]


def test_logprobs_are_of_the_chosen_token(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BUNDLED_MODEL, messages=QUESTION, logprobs=True, top_logprobs=3, max_tokens=3
    )
    assert answer.choices[0].logprobs is not None
    for entry in answer.choices[0].logprobs.content or []:
        assert entry.top_logprobs[0].token == entry.token  # greedy
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_are_those_of_the_generation(client: openai.OpenAI, max_tokens: int) -> None:
    """As lm-evaluation-harness scores a continuation: from its log-probabilities, and whether it is the greedy one."""
    question = client.completions.create(model=BUNDLED_MODEL, prompt="What is 7 * 8?", max_tokens=12, logprobs=1)
    generated = question.choices[0].logprobs
    assert generated is not None
    context = "What is 7 * 8?"
    echoed = client.completions.create(
        model=BUNDLED_MODEL, prompt=context + question.choices[0].text, max_tokens=max_tokens, logprobs=1, echo=True
    ).choices[0]
    assert echoed.text.startswith(context + question.choices[0].text)
    found = echoed.logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert found.text_offset is not None
    assert (found.token_logprobs[0], found.top_logprobs[0]) == (None, None)
    first = found.text_offset.index(len(context))
    scored = slice(first, len(found.tokens) - max_tokens)
    assert "".join(found.tokens[scored]) == question.choices[0].text
    for token, logprob, top, expected in zip(
        found.tokens[scored],
        found.token_logprobs[scored],
        found.top_logprobs[scored],
        generated.token_logprobs or [],
        strict=False,
    ):
        assert logprob == max(top.values())
        assert token in top
        assert logprob == pytest.approx(expected, abs=1e-3)


def test_repeated_request_hits_the_prefix_cache(server: RunningServer, client: openai.OpenAI) -> None:
    prompt = list(range(100, 400))
    for expected in (0, 256):
        answer = client.completions.create(model=BUNDLED_MODEL, prompt=prompt, max_tokens=1)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected
    assert server.metrics()["prefix_cache_hits_total"] >= 256


def test_answers_to_one_prompt_share_its_pages(server: RunningServer, client: openai.OpenAI) -> None:
    prompt = list(range(200, 530))  # 330 tokens, whose five full pages are computed once
    settings: dict[str, Any] = {"model": BUNDLED_MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 1.2}
    before = server.metrics()["prefix_cache_hits_total"]
    answer = client.completions.create(**settings, seed=11, n=4, logprobs=0)
    assert server.metrics()["prefix_cache_hits_total"] - before == 3 * 320
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (330, 0)
    texts = [choice.text for choice in answer.choices]
    assert texts == [client.completions.create(**settings, seed=11 + n).choices[0].text for n in range(4)]
    assert len(set(texts)) > 1
    means = [fmean(choice.logprobs.token_logprobs) for choice in answer.choices if choice.logprobs]  # type: ignore[arg-type]
    order = sorted(range(4), key=lambda index: means[index], reverse=True)
    best = client.completions.create(**settings, seed=11, n=2, best_of=4)
    assert [choice.text for choice in best.choices] == [texts[index] for index in order[:2]]


def test_each_of_several_answers_follows_the_grammar(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=BUNDLED_MODEL,
        messages=QUESTION,
        n=4,
        temperature=1.5,
        seed=3,
        extra_body={"structured_outputs": {"regex": "[a-z]{3}-[0-9]{2}"}},
    )
    texts = [choice.message.content or "" for choice in answer.choices]
    assert all(re.fullmatch("[a-z]{3}-[0-9]{2}", text) for text in texts)
    assert len(set(texts)) > 1


def test_bias_forces_and_forbids_a_token(server: RunningServer, client: openai.OpenAI) -> None:
    [seven] = server.post("/tokenize", {"prompt": "7", "add_special_tokens": False}).json["tokens"]
    settings: dict[str, Any] = {"model": BUNDLED_MODEL, "messages": QUESTION, "max_tokens": 3}
    forced = client.chat.completions.create(**settings, logit_bias={str(seven): 100})
    assert forced.choices[0].message.content == "777"
    plain = client.completions.create(model=BUNDLED_MODEL, prompt="7", max_tokens=1, logprobs=0)
    assert plain.choices[0].logprobs is not None
    [first] = server.post("/tokenize", {"prompt": plain.choices[0].text, "add_special_tokens": False}).json["tokens"]
    banned = client.completions.create(model=BUNDLED_MODEL, prompt="7", max_tokens=1, logit_bias={str(first): -100})
    assert banned.choices[0].text != plain.choices[0].text


@pytest.mark.parametrize("stream", [True, False])
def test_client_disconnect_frees_the_request_in_the_engine(server: RunningServer, stream: bool) -> None:
    body = {"model": BUNDLED_MODEL, "prompt": "7", "ignore_eos": True, "max_tokens": 2000, "stream": stream}
    aborted = server.metrics()["requests_aborted_total"]
    connection = server.open("/v1/completions", body)
    server.wait_metric("num_requests_running", 1)
    connection.close()
    assert server.check_no_leak()["requests_aborted_total"] == aborted + 1


@pytest.mark.parametrize("tool_server", ["hermes"], indirect=True)
def test_exhausted_pages_preempt_and_change_no_greedy_text(server: RunningServer, tool_server: RunningServer) -> None:
    prompts = [list(range(50 + n, 110 + n)) for n in range(24)]

    def ask(where: RunningServer, prompt: list[int]) -> str:
        body = {"model": BUNDLED_MODEL, "prompt": prompt, "ignore_eos": True, "max_tokens": 80}
        text: str = where.post("/v1/completions", body).json["choices"][0]["text"]
        return text

    with ThreadPoolExecutor(24) as pool:
        roomy = list(pool.map(lambda prompt: ask(server, prompt), prompts))
        assert list(pool.map(lambda prompt: ask(tool_server, prompt), prompts)) == roomy
    found = tool_server.check_no_leak()
    assert found["num_preemptions_total"] > 0
    assert found["requests_finished_total"] == 24


def test_sigterm_during_loading_exits_immediately(tmp_path: Path) -> None:
    with running(SERVE, tmp_path / "stderr") as server:
        engine = wait_for_engine(server)
        server.signal()
        assert server.wait_exit() == 0
        assert not Path(f"/proc/{engine}").exists()


def wait_for_engine(server: RunningServer) -> int:
    wait_until(lambda: server.engine_pids() != [], "the engine to be started")
    return server.engine_pid()


def test_too_little_memory_prints_one_line(tmp_path: Path) -> None:
    with running([*SERVE, "--memory", "9MiB"], tmp_path / "stderr") as server:
        assert server.wait_exit(WAIT_S) == 2
        assert "--max-model-len" in server.stderr.strip().splitlines()[-1]


def test_daemon_is_ready_when_serve_returns_and_has_exited_after_stop(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}

    def meltcore(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*MELTCORE, *arguments], env=environment, capture_output=True, text=True, timeout=WAIT_S)

    started = meltcore("serve", BUNDLED_MODEL, "--port", "0", "--device", "cpu", "--daemon")
    try:
        assert started.returncode == 0
        url = read_daemon_url(started.stdout)
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert client.models.list().data[0].id == BUNDLED_MODEL
        port = url.rpartition(":")[2]
        taken = meltcore("serve", BUNDLED_MODEL, "--port", port, "--daemon")
        assert taken.returncode == 2
        assert f"{url} serves {BUNDLED_MODEL} already" in taken.stderr
    finally:
        stopped = meltcore("stop")
    assert stopped.returncode == 0
    assert url in stopped.stdout
    assert meltcore("stop").returncode == 2


def test_failed_daemon_start_reports_the_reason(tmp_path: Path) -> None:
    environment = os.environ | {"XDG_STATE_HOME": str(tmp_path)}
    failed = subprocess.run(
        [*MELTCORE, "serve", "./nowhere", "--port", "0", "--daemon"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
    )
    assert failed.returncode == 2
    assert "./nowhere: no such folder" in failed.stderr


RECORD = {
    "type": "object",
    "properties": {"answer": {"type": "integer"}, "unit": {"enum": ["coins", "tents"]}},
    "required": ["answer", "unit"],
    "additionalProperties": False,
}


class Price(pydantic.BaseModel):
    coins: int = pydantic.Field(ge=0, le=99)


class Purchase(pydantic.BaseModel):
    """As clients write it: openai makes a strict schema with definitions and titles of it."""

    total: Price
    kind: Literal["tent", "lamp"]
    is_paid: bool


def schema_format(schema: dict[str, object], *, strict: bool = False) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "record", "schema": schema, "strict": strict}}


def test_structured_answer_follows_its_schema_streamed_and_unstreamed(
    server: RunningServer, client: openai.OpenAI
) -> None:
    for temperature in (0.0, 1.0):
        settings = {"temperature": temperature, "seed": 1, "max_tokens": 100}
        ask = partial(client.chat.completions.create, model=BUNDLED_MODEL, messages=QUESTION, **settings)
        answer = ask(response_format=schema_format(RECORD, strict=True))
        assert answer.choices[0].finish_reason == "stop"
        jsonschema.validate(json.loads(answer.choices[0].message.content or ""), RECORD)
        chunks = list(ask(response_format=schema_format(RECORD, strict=True), stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == answer.choices[0].message.content
    parsed = client.chat.completions.parse(
        model=BUNDLED_MODEL, messages=QUESTION, response_format=Purchase, max_tokens=200, temperature=1.5, seed=3
    )
    purchase = parsed.choices[0].message.parsed
    assert purchase is not None
    assert 0 <= purchase.total.coins <= 99
    chosen = client.completions.create(
        model=BUNDLED_MODEL, prompt="x", extra_body={"structured_outputs": {"choice": ["left", "right"]}}
    )
    assert chosen.choices[0].text in ("left", "right")
    metrics = server.metrics()
    assert metrics["grammars_compiled_total"] >= 2
    assert metrics["grammar_masks_total"] > 10
    assert metrics["grammar_compile_seconds_total"] > 0


def test_weakened_schema_is_named_in_header_and_body(server: RunningServer) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 3, "uniqueItems": True}
    body = {"model": BUNDLED_MODEL, "messages": QUESTION, "response_format": schema_format(schema), "max_tokens": 40}
    answer = server.post("/v1/chat/completions", body)
    assert "uniqueItems" in answer.headers["x-weakened-schema"]
    assert ["uniqueItems" in text for text in answer.json["weakened_schema"]] == [True]
    streamed = server.post("/v1/chat/completions", body | {"stream": True})
    assert "uniqueItems" in streamed.headers["x-weakened-schema"]
    assert all("uniqueItems" in event["weakened_schema"][0] for event in streamed.events)
    strict = server.post("/v1/chat/completions", body | {"response_format": schema_format(schema, strict=True)})
    assert strict.status == 400
    assert "uniqueItems" in strict.error["message"]
    free = server.post("/v1/chat/completions", body | {"response_format": {"type": "text"}})
    assert "x-weakened-schema" not in free.headers
    assert "weakened_schema" not in free.json


@pytest.mark.parametrize("tool_server", ["hermes", "qwen3_coder"], indirect=True)
def test_forced_call_follows_the_schema_of_its_tool(tool_server: RunningServer) -> None:
    """The model knows no tools: only the grammar makes it call."""
    answer_limits = {"type": "integer", "minimum": 0, "maximum": 999}  # a small model writes digits without an end
    schema = RECORD | {"properties": RECORD["properties"] | {"answer": answer_limits}}  # type: ignore[operator]
    record, other = ({"name": name, "parameters": schema, "strict": True} for name in ("record", "other"))
    tools = [{"type": "function", "function": function} for function in (record, other)]
    named = {"type": "function", "function": {"name": "other"}}
    body = {"model": BUNDLED_MODEL, "messages": QUESTION, "tools": tools, "max_tokens": 400}
    for choice in ("required", named):
        fields = body | {"tool_choice": choice, "parallel_tool_calls": False}
        answer = tool_server.post("/v1/chat/completions", fields)
        [whole] = answer.json["choices"]
        [call] = whole["message"]["tool_calls"]
        assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", None)
        assert call["function"]["name"] in ("record", "other")
        assert choice == "required" or call["function"]["name"] == "other"
        jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
        events = tool_server.post("/v1/chat/completions", fields | {"stream": True}).events
        parts = [part for event in events for part in event["choices"][0]["delta"].get("tool_calls", ())]
        assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]
    tool_server.check_no_leak()


@pytest.mark.parametrize("tool_server", ["qwen3_coder"], indirect=True)
def test_killed_engine_ends_the_server_and_every_request(tool_server: RunningServer) -> None:
    """The last test of this server."""
    with ThreadPoolExecutor(4) as pool:
        body = {"model": BUNDLED_MODEL, "prompt": "7", "ignore_eos": True}
        answers = [pool.submit(tool_server.post, "/v1/completions", body) for _ in range(4)]
        tool_server.wait_metric("num_requests_running", 4)
        os.kill(tool_server.engine_pid(), signal.SIGKILL)
        assert [answer.result().error["code"] for answer in answers] == ["engine_dead"] * 4
        assert tool_server.request("GET", "/health").status == 503
        assert tool_server.wait_exit() == 1
