"""A server that speculates: several tokens in one event, counted and timed as tokens by clients and metrics."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import pytest
from server_harness import RunningServer, running
from waiting import WAIT_S

from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import run_levels
from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL

pytestmark = pytest.mark.slow
SPECULATION = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
QUESTION = [{"role": "user", "content": "What is 7 * 8?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    serve = [sys.executable, "-m", "meltcore.cli.main", "serve", BUNDLED_MODEL, "--port", "0", "--device", "cpu"]
    stderr = tmp_path_factory.mktemp("serve") / "stderr"
    with running([*serve, "--speculative-config", json.dumps(SPECULATION)], stderr) as server:
        server.wait_healthy(WAIT_S)
        yield server
        server.check_no_leak()


def test_answers_logprobs_stops_and_counters(server: RunningServer) -> None:
    def ask(**fields: object) -> dict:
        body = {"model": BUNDLED_MODEL, "messages": QUESTION, "max_tokens": 60, **fields}
        return server.post("/v1/chat/completions", body).json["choices"][0]

    plain = ask(speculative_decoding=False, logprobs=True)
    before = server.metrics()
    found = ask(logprobs=True)
    after = server.metrics()
    assert found["message"] == plain["message"]
    assert "56" in found["message"]["content"]
    entries, expected = found["logprobs"]["content"], plain["logprobs"]["content"]
    assert [each["token"] for each in entries] == [each["token"] for each in expected]
    assert [each["logprob"] for each in entries] == pytest.approx([each["logprob"] for each in expected], abs=1e-3)
    accepted, drafted = (
        after[f"spec_decode_num_{name}_tokens_total"] - before[f"spec_decode_num_{name}_tokens_total"]
        for name in ("accepted", "draft")
    )
    assert 0 < accepted <= drafted
    text = found["message"]["content"]
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    assert ask(stop=stop)["message"]["content"] == text[: text.index(stop)]
    assert (
        ask(max_tokens=5)["message"]["content"] == ask(max_tokens=5, speculative_decoding=False)["message"]["content"]
    )


def test_load_counts_tokens_and_not_events(server: RunningServer) -> None:
    before = server.metrics()
    [result] = run_levels(
        LoadConfig(url=server.url, workload="problems:short", concurrency=(2,), num_prompts=(8,), num_warmups=0)
    )
    after = server.metrics()
    assert result.failures == {}
    assert result.accuracy == 1.0
    assert result.output_tokens == after["generation_tokens_total"] - before["generation_tokens_total"]
    assert result.events_per_token is not None
    assert result.events_per_token < 1
    assert result.itl_unit == "token"
    assert result.itl_ms.mean is not None
    assert result.e2e_ms.mean is not None
    assert result.ttft_ms.mean is not None
    each_ms = (result.e2e_ms.mean - result.ttft_ms.mean) / (result.output_tokens / result.succeeded - 1)
    # The end of an answer may come later than its last token.
    assert 0.3 * each_ms < result.itl_ms.mean < 1.3 * each_ms
