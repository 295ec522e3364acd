"""The demo's conversations with a language model: what is sent, what passes, and what the page shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from sample_results import sample_run

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import DemoSample
from meltcore.measure.experiments.demo.config import DemoConfig
from meltcore.measure.experiments.demo.run import CONVERSATIONS, converse, write_fleet
from meltcore.measure.experiments.servers import ApiResponse
from meltcore.measure.report.render import render


class ScriptedApi:
    """Answers every chat with `answer`, or with the status of an error."""

    def __init__(self, answer: str = "In Paris, Bella plays the violin for <b>honey</b>.", status: int = 200) -> None:
        self.answer, self.status = answer, status
        self.bodies: list[dict[str, Any]] = []

    def post(self, path: str, body: dict[str, Any]) -> ApiResponse:
        assert path == "/v1/chat/completions"
        self.bodies.append(json.loads(json.dumps(body)))
        reply = {"choices": [{"message": {"role": "assistant", "content": f" {self.answer}\n"}}]}
        return ApiResponse(self.status, {}, json.dumps(reply).encode())


def test_each_question_follows_the_answers_before_it() -> None:
    api = ScriptedApi()
    checks, samples = converse(api, "small")  # type: ignore[arg-type]
    assert [check.status for check in checks] == ["PASS"] * len(CONVERSATIONS)
    assert len(samples) == sum(len(each.messages) for each in CONVERSATIONS) == len(api.bodies)
    assert all(body["model"] == "small" and body["temperature"] == 0 for body in api.bodies)
    [last_of_three] = [body["messages"] for body in api.bodies if len(body["messages"]) == 5]
    assert [each["role"] for each in last_of_three] == ["user", "assistant", "user", "assistant", "user"]
    assert last_of_three[1]["content"] == api.answer
    assert {sample.answer for sample in samples} == {api.answer}


@pytest.mark.parametrize(
    ("api", "failed", "detail"),
    [
        (ScriptedApi("Lyon."), 4, "Lyon."),  # all but the question without a known answer
        (ScriptedApi(""), len(CONVERSATIONS), ""),
        (ScriptedApi(status=503), len(CONVERSATIONS), "status 503"),
    ],
)
def test_wrong_missing_and_refused_answers_fail(api: ScriptedApi, failed: int, detail: str) -> None:
    checks, samples = converse(api, "small")  # type: ignore[arg-type]
    wrong = [check for check in checks if check.status == "FAIL"]
    assert len(wrong) == failed
    assert detail in (wrong[0].detail or "")
    assert bool(samples) is (api.status == 200)


def test_page_shows_questions_and_answers_as_text() -> None:
    html = render(sample_run(samples=[DemoSample(given="Who?", answer="<b>Ada</b>")]))
    assert "Conversations" in html
    assert "&lt;b&gt;Ada&lt;/b&gt;" in html
    assert "Translations and transcripts" not in html
    assert "Conversations" not in render(sample_run())


def test_fleet_serves_the_model_beside_the_bundled_ones(tmp_path: Path) -> None:
    model = tmp_path / "Small-Model.Q4_1.gguf"
    with pytest.raises(ConfigError, match=r"--chat-model: .*Small-Model.Q4_1.gguf does not exist"):
        DemoConfig(chat_model=str(model))
    model.touch()
    config = DemoConfig(chat_model=str(model), tasks=("generation",))
    write_fleet(tmp_path / "fleet.yaml", config.tasks, config.chat_model)
    models = yaml.safe_load((tmp_path / "fleet.yaml").read_text())["models"]
    assert list(models) == ["sums", "small-model.q4_1"], "the first one answers the problems"
    assert models["small-model.q4_1"]["checkpoint"] == str(model)
