"""A reasoning model and one beside it, served by real engines behind one API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from server_harness import RunningServer, configure, running, serve_command
from waiting import WAIT_S

from meltcore.common.options import Size
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND
from meltcore.models.checkpoints.checkpoint import BUNDLED_HYBRID, BUNDLED_MODEL
from meltcore.settings.fleet_spec import ModelSection

pytestmark = pytest.mark.slow
NAMES = (BUNDLED_MODEL, BUNDLED_HYBRID)
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
STORY = "Rosa buys 4 tents at 25 coins each and pays with 136 coins. How many coins come back?"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    models = {name: ModelSection(checkpoint=name, device="cpu", memory=Size(2**27)) for name in NAMES}
    command = serve_command(configure(models, port=0, api_server_count=1), engine=ENGINE_COMMAND)
    with running(command, tmp_path_factory.mktemp("serve") / "stderr") as server:
        server.wait_healthy(WAIT_S)
        yield server
        server.check_no_leak()


def ask(server: RunningServer, **fields: Any) -> Any:
    body = {"model": BUNDLED_HYBRID, "messages": [{"role": "user", "content": STORY}], "temperature": 0}
    return server.post("/v1/chat/completions", body | fields)


def test_both_models_answer_from_one_api_server(server: RunningServer) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=WAIT_S, max_retries=0) as client:
        assert [model.id for model in client.models.list()] == list(NAMES)
        for name in NAMES:
            question: Any = [{"role": "user", "content": "What is 7 * 8?"}]
            answer = client.chat.completions.create(model=name, messages=question)
            assert "56" in (answer.choices[0].message.content or "")
            assert answer.model == name


def test_reasoning_is_off_by_default(server: RunningServer) -> None:
    message = ask(server).json["choices"][0]["message"]
    assert message["content"].endswith("The answer is 36.")
    assert "think>" not in message["content"]
    assert "reasoning_content" not in message


def test_reasoning_is_separate_from_the_answer(server: RunningServer) -> None:
    choice = ask(server, **THINKING).json["choices"][0]
    assert choice["message"]["content"] == "The answer is 36."
    assert "136 - 100 = 36" in choice["message"]["reasoning_content"]
    assert "think>" not in str(choice)


def test_reasoning_is_streamed_before_the_answer(server: RunningServer) -> None:
    whole = ask(server, **THINKING).json["choices"][0]["message"]
    deltas = [event["choices"][0]["delta"] for event in ask(server, stream=True, **THINKING).events]
    assert "".join(delta["content"] for delta in deltas) == whole["content"]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == whole["reasoning_content"]
    first_content = next(index for index, delta in enumerate(deltas) if delta["content"])
    assert all("reasoning_content" not in delta for delta in deltas[first_content + 1 :])


def test_answer_with_reasoning_can_be_sent_back_as_history(server: RunningServer) -> None:
    message = ask(server, **THINKING).json["choices"][0]["message"]
    turns = [{"role": "user", "content": STORY}, message, {"role": "user", "content": "What is 7 * 8?"}]
    answer = ask(server, messages=turns)
    assert answer.status == 200, answer.body
    assert answer.json["choices"][0]["message"]["content"].startswith("The answer is ")


def test_unfinished_reasoning_is_not_part_of_the_answer(server: RunningServer) -> None:
    choice = ask(server, max_tokens=5, **THINKING).json["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"]


def test_completion_includes_reasoning_text(server: RunningServer) -> None:
    prompt = f"<|im_start|>user\n{STORY}<|im_end|>\n<|im_start|>assistant\n<think>\n"
    body = {"model": BUNDLED_HYBRID, "prompt": prompt, "temperature": 0, "max_tokens": 100}
    text = server.post("/v1/completions", body).json["choices"][0]["text"]
    assert text.endswith("</think>\n\nThe answer is 36.")


@pytest.mark.parametrize("budget", [0, 1, 8, 1000])
def test_reasoning_ends_within_its_budget(server: RunningServer, budget: int) -> None:
    """The answer follows, also where the budget cuts the reasoning off."""
    free = ask(server, **THINKING).json["choices"][0]["message"]
    choice = ask(server, thinking_token_budget=budget, **THINKING).json["choices"][0]
    reasoning = choice["message"].get("reasoning_content", "")
    count = server.post("/tokenize", {"prompt": reasoning, "add_special_tokens": False}).json["count"]
    assert count <= budget
    assert choice["finish_reason"] == "stop"
    assert "The answer is" in choice["message"]["content"]
    if budget == 1000:
        assert choice["message"] == free
    schema = {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "integer", "maximum": 99, "minimum": 0}},
    }
    shaped = ask(server, thinking_token_budget=budget, response_format=schema, **THINKING).json["choices"][0]["message"]
    assert 0 <= int(shaped["content"]) <= 99


def test_budget_without_reasoning_changes_nothing_and_must_be_in_range(server: RunningServer) -> None:
    assert ask(server, thinking_token_budget=5).json["choices"] == ask(server).json["choices"]
    assert ask(server, thinking_token_budget=-1).error["param"] == "thinking_token_budget"
