"""Sliding windows on two ranks: the stacked page table by rank messages, and the logits of one device."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import sliding_tools
from test_tensor_parallel import LOGITS_TOLERANCE, answers, opened

from meltcore.engine.distributed.group_runner import GroupRunner


@pytest.mark.slow
def test_ranks_give_the_logits_and_tokens_of_one_device(tmp_path: Path) -> None:
    sliding_tools.save(sliding_tools.make_reference(sliding_tools.NETWORKS["mixed"]), tmp_path)
    settings = {"max_num_batched_tokens": 64, "max_num_seqs": 12, "overlap": True}
    long, found = [], []
    for ranks in (1, 2):
        with opened(tmp_path, ranks, **settings) as seen:
            assert isinstance(seen.engine.runner, GroupRunner) == (ranks == 2)
            seen.add("long", tools.random_prompt(230, 7), max_tokens=60)
            long.append(seen.run()["long"])
            found.append(answers(seen))
    assert long[0] == long[1]
    expected, answered = found
    assert answered.tokens == expected.tokens
    compared = 0
    for request_id, rows in answered.logits.items():
        for ours, theirs in zip(rows, expected.logits[request_id], strict=False):
            assert tools.relative_error(ours, theirs) <= LOGITS_TOLERANCE, request_id
            compared += 1
    assert compared > 100
