"""The `openai` Python client, unchanged, against a server."""

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from server_harness import MODEL, RunningServer, scripted_server
from waiting import WAIT_S

from meltcore.serve.requests.protocol import ChatRequest, CompletionRequest


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with scripted_server("--step-s", "0.003", api_key="key", engine={"max_model_len": 200}) as running:
        yield running
        running.check_no_leak()


def ask(client: openai.OpenAI, **fields: object) -> object:
    return client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}], **fields)


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "developer", "content": "a"}, {"role": "user", "content": "bc"}],
        max_completion_tokens=4,
        logprobs=True,
        top_logprobs=2,
        extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True, "chat_template_kwargs": {"enable_thinking": False}},
    )
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "abca", "length")
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs.content or []] == ["a", "b", "c", "a"]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)


def test_answer_can_be_sent_back_as_history(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "ab"}], max_completion_tokens=2
    )
    messages = [{"role": "user", "content": "x"}, first.choices[0].message.model_dump()]
    second = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=3)
    assert second.choices[0].message.content == "xab"


def test_chat_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "hellohellohe"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_several_answers_and_biases(client: openai.OpenAI) -> None:
    biased = {"logit_bias": {"97": -100, "98": 5}, "max_completion_tokens": 5, "n": 3}
    messages: Any = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, **biased)  # type: ignore[call-overload]
    assert [(choice.index, choice.message.content) for choice in whole.choices] == [(n, "hello") for n in range(3)]
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model=MODEL, messages=messages, stream=True, **biased):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == ["hello"] * 3
    best = client.completions.create(model=MODEL, prompt="ab", max_tokens=2, n=2, best_of=3)
    assert [choice.text for choice in best.choices] == ["ab", "ab"]


def test_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=["ab", "cd"], max_tokens=3, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["aba", "cdc"]
    stream = client.completions.create(model=MODEL, prompt=[97, 98], max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "aba"


def test_every_field_of_the_client_is_known() -> None:
    """Each is honored, accepted or refused by a rule of its own, and stands in docs/api.md."""
    for params, form in ((chat_params, ChatRequest), (completion_params, CompletionRequest)):
        fields = params.CompletionCreateParamsBase.__annotations__.keys()
        assert fields <= set(form.__struct_fields__)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "meltcore"


def test_concurrent_async_streams(server: RunningServer) -> None:
    async def one(client: openai.AsyncOpenAI, text: str) -> str:
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": text}], max_tokens=len(text), stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key", timeout=WAIT_S) as client:
            return await asyncio.gather(*(one(client, f"text {n}") for n in range(20)))

    assert asyncio.run(all_of_them()) == [f"text {n}" for n in range(20)]


def test_closing_a_stream_early_aborts_it(server: RunningServer, client: openai.OpenAI) -> None:
    aborted = server.metrics()["requests_aborted_total"]
    stream = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hello"}], stream=True)
    next(iter(stream))
    stream.close()
    assert server.check_no_leak()["requests_aborted_total"] == aborted + 1


def test_errors_come_as_the_clients_own_types(server: RunningServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, max_tokens=0)
    assert bad.value.param == "max_tokens"
    assert bad.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError, match="functions is not supported"):
        ask(client, functions=[{"name": "f"}])
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        ask(client.with_options(api_key="wrong"))


@pytest.mark.slow
def test_full_queue_raises_the_clients_rate_limit_error() -> None:
    with scripted_server("--silent-steps", "100000", engine={"max_num_seqs": 1}, max_queue=0) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0)
        first = server.open("/v1/completions", {"model": MODEL, "prompt": "x"})
        server.wait_metric("requests_in_flight", 1)
        with client, pytest.raises(openai.RateLimitError):
            ask(client)
        first.close()
        server.check_no_leak()


@pytest.mark.slow
def test_stream_that_fails_midway_raises() -> None:
    with scripted_server("--step-s", "0.02", request_timeout_s=0.4) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0)
        with client, pytest.raises(openai.APIError, match="request-timeout"):
            list(ask(client, stream=True))  # type: ignore[call-overload]
        server.check_no_leak()
