"""Sampling in blocks of rows, so that the logits of all sequences need not be in memory together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import engine_tools as tools
import pytest
import torch

from meltcore.engine.memory.memory_plan import LOGITS_FRACTION, RESERVE_FRACTION
from meltcore.engine.memory.workspace import LOGIT_BYTES
from meltcore.engine.worker.sampler import Sampler, SampleResult

KINDS: list[dict[str, object]] = [
    {"temperature": 1.0, "seed": 5},
    {"logprobs": 3},
    {},
    {"temperature": 1.0, "seed": 6, "top_k": 20, "logprobs": 1},
    {"repetition_penalty": 1.5},
    {"temperature": 0.7, "seed": 7, "min_tokens": 5, "logprobs": 0},
]


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_blocks_give_the_answers_and_logprobs_of_one_block(
    checkpoint: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    largest: list[int] = []
    sample = Sampler.sample

    def noting(sampler: Sampler, logits: torch.Tensor, requests: list, *rest: Any) -> SampleResult:
        largest.append(len(requests))
        return sample(sampler, logits, requests, *rest)

    monkeypatch.setattr(Sampler, "sample", noting)
    found = []
    for most in (100, rows):
        largest.clear()
        seen = tools.open_engine(checkpoint)
        runner = seen.engine.runner
        runner._config = runner._config._replace(logit_rows=most)
        for number, kind in enumerate(KINDS):
            seen.add(f"r{number}", tools.random_prompt(20 + number, number), max_tokens=12, **kind)
        outputs = seen.outputs()
        found.append([(each.request_id, each.token_ids, each.logprobs) for each in outputs])
        assert max(largest) == min(most, len(KINDS) - 1)
    assert found[0] == found[1]
    assert any(logprobs for _, _, logprobs in found[0])


def test_blocks_with_and_without_logprobs_concatenate() -> None:
    def block(ids: list[int], rows: list[int], width: int) -> SampleResult:
        chosen = torch.tensor([-0.5 * row for row in rows])
        top_tokens = torch.arange(len(rows) * width).view(len(rows), width)
        return SampleResult(torch.tensor(ids), rows, (chosen, top_tokens.float(), top_tokens) if rows else None)

    joined = SampleResult.concatenate([block([1, 2], [1], 2), block([3], [], 0), block([4, 5], [0, 1], 3)])
    assert joined.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert joined.logprob_rows == [1, 3, 4]
    assert joined.logprobs is not None
    assert [part.tolist() for part in joined.logprobs[::2]] == [[-0.5, 0.0, -0.5], [[0, 1, 0], [0, 1, 2], [3, 4, 5]]]
    assert SampleResult.concatenate([block([1], [], 0), block([2], [], 0)]).logprobs is None


@pytest.mark.parametrize(("gigabytes", "rows"), [(6, 98), (140, 2303)])
def test_logits_fit_their_fraction_of_the_reserve(gigabytes: int, rows: int) -> None:
    plan = tools.plan_of_qwen(gigabytes * 10**9)
    assert plan.logit_rows == rows
    assert rows * 2 * LOGIT_BYTES * 151936 <= gigabytes * 10**9 * RESERVE_FRACTION * LOGITS_FRACTION
