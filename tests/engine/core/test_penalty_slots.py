"""Penalty slots: the number of running sequences, the memory of token counts, and the order of waiting requests."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import pytest
import torch

from meltcore.common.sizes import size_text
from meltcore.engine.memory import memory_plan as memory
from meltcore.engine.memory.memory_plan import PENALTY_FRACTION, RESERVE_FRACTION
from meltcore.engine.worker.sampler import PenaltyTable

MEMORY_BYTES = 256 * 2**20
SLOT_BYTES = 5 * tools.VOCAB
KINDS: list[dict[str, object]] = [
    {"repetition_penalty": 1.5},
    {"temperature": 1.0, "seed": 5, "frequency_penalty": 1.0},
    {"temperature": 1.0, "seed": 6, "presence_penalty": 1.0, "top_k": 50},
    {},
]


def opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch, slots: int, *, overlap: bool = False, **settings: object
) -> tools.SeenEngine:
    """An engine with this many penalty slots."""
    monkeypatch.setattr(memory, "PENALTY_FRACTION", (slots + 0.5) * SLOT_BYTES / (MEMORY_BYTES * RESERVE_FRACTION))
    seen = tools.open_engine(folder, overlap=overlap, memory_bytes=MEMORY_BYTES, **settings)  # type: ignore[arg-type]
    assert len(seen.engine.runner.sampler._penalties._output_counts) == slots
    return seen


def running(seen: tools.SeenEngine) -> list[str]:
    return [request.id for request in seen.engine.scheduler.running]


REQUESTS = {f"r{index}": (tools.random_prompt(60 + 7 * index, index), KINDS[index % len(KINDS)]) for index in range(12)}


@pytest.fixture(scope="module")
def answers_alone(checkpoint: Path) -> dict[str, list[int]]:
    """What an engine with one slot answers to one request after the other."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        alone = opened(checkpoint, monkeypatch, 1)
    expected: dict[str, list[int]] = {}
    for request_id, (prompt, kind) in REQUESTS.items():
        alone.add(request_id, prompt, max_tokens=90, **kind)
        expected |= alone.run()
    return expected


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_more_penalized_requests_than_slots_give_the_same_answers(
    checkpoint: Path, answers_alone: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    """Slots are reused after ends and preemptions, and never keep the counts of an earlier sequence."""
    seen = opened(checkpoint, monkeypatch, 3, overlap=overlap, pages=9, max_model_len=300)
    for request_id, (prompt, kind) in REQUESTS.items():
        seen.add(request_id, prompt, max_tokens=90, **kind)
    answers: dict[str, list[int]] = {}
    most = 0
    for output in seen.outputs():
        answers.setdefault(output.request_id, []).extend(output.token_ids)
        most = max(most, sum(request.has_penalties for request in seen.engine.scheduler.running))
    assert answers == answers_alone
    assert most == 3
    assert seen.engine.stats().preemptions_total > 0


def test_request_without_penalties_does_not_wait_for_a_slot(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = opened(checkpoint, monkeypatch, 1)
    for name in ("first", "second", "third"):
        seen.add(name, tools.random_prompt(20, 1), max_tokens=5, repetition_penalty=1.2)
    seen.add("plain", tools.random_prompt(20, 2), max_tokens=40)
    started = {}
    for step in range(20):
        seen.engine.step()
        for name in running(seen):
            started.setdefault(name, step)
    assert started["first"] == started["plain"] == 0
    assert started["first"] < started["second"] < started["third"]


def test_free_slot_is_kept_for_the_first_request_that_waits_for_pages(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise sequences without penalties, small enough for the freed pages, would overtake it for ever."""
    seen = opened(checkpoint, monkeypatch, 1, pages=5, max_model_len=300)
    seen.add("holder", tools.random_prompt(20, 1), max_tokens=3, repetition_penalty=1.2)
    seen.add("plain", tools.random_prompt(100, 2), max_tokens=20)
    seen.add("large", tools.random_prompt(250, 3), max_tokens=3, repetition_penalty=1.2)
    seen.engine.step()
    assert running(seen) == ["holder", "plain"]
    while "holder" in running(seen):
        seen.engine.step()
    seen.add("late", tools.random_prompt(20, 4), max_tokens=40)
    order = ["holder", "plain"]
    while seen.engine.has_work:
        seen.engine.step()
        order += [name for name in running(seen) if name not in order]
    assert order == ["holder", "plain", "large", "late"]


def test_aborted_request_releases_its_slot(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = opened(checkpoint, monkeypatch, 1, overlap=True)
    seen.add("first", tools.random_prompt(20, 1), max_tokens=50, repetition_penalty=1.2)
    seen.add("second", tools.random_prompt(20, 1), max_tokens=50, repetition_penalty=1.2)
    for _ in range(3):
        seen.engine.step()
    assert running(seen) == ["first"]
    seen.engine.abort(["first"])
    seen.engine.step()
    assert running(seen) == ["second"]
    seen.engine.abort(["second"])
    seen.run()


@pytest.mark.parametrize(
    ("gigabytes", "max_num_seqs", "slots"),
    [(2, 1024, 26), (6, 1024, 78), (24, 1024, 315), (80, 1024, 1024), (140, 1024, 1024), (6, 16, 16)],
)
def test_token_counts_take_at_most_an_eighth_of_the_reserve(gigabytes: int, max_num_seqs: int, slots: int) -> None:
    plan = tools.plan_of_qwen(gigabytes * 10**9, max_num_seqs)
    (reserve,) = [row for row in plan.rows if row.name == "reserve"]
    table = PenaltyTable(plan.penalty_slots, 151936, torch.device("meta"))
    taken = table._output_counts.nbytes + table._in_prompt.nbytes
    assert plan.penalty_slots == slots
    assert taken <= reserve.size_bytes * PENALTY_FRACTION
    assert reserve.note == f"activations, workspaces, {size_text(taken)} for penalties of {slots:,} sequences"


def test_one_penalized_sequence_can_always_run(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PENALTY_FRACTION", 0.0)
    seen = tools.open_engine(checkpoint)
    assert len(seen.engine.runner.sampler._penalties._output_counts) == 1
    for index in range(3):
        seen.add(str(index), tools.random_prompt(20, 1), max_tokens=4, repetition_penalty=1.2)
    assert {len(tokens) for tokens in seen.run().values()} == {4}
