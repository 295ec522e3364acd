"""`--debug uniform-routing`: experts drawn all alike, and how many of them a step uses."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from places import ROOT
from test_routed_experts import build

from meltcore.engine.generation.engine import GenerationEngine
from meltcore.layers import uniform_routing
from meltcore.layers.uniform_routing import (
    clear_routing_record,
    mean_experts_used,
    record_routing,
    set_uniform_routing,
    uniform_routing_seed,
)
from meltcore.protocol.generation import AddRequest
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.settings.config import EngineConfig


@pytest.fixture(autouse=True)
def _routed_by_the_router_afterwards() -> Iterator[None]:
    yield
    set_uniform_routing(False, 0)


def decode(engine: GenerationEngine, sequences: int) -> None:
    for number in range(sequences):
        engine.add(AddRequest(f"{number}", [1, 2, number], SamplingParams(max_tokens=3, ignore_eos=True)))
    while engine.has_work:
        engine.step()


def test_decode_step_counts_the_experts_it_uses(tmp_path: Path) -> None:
    """Of 64 experts, 2 for each of 20 tokens: 64 (1 - (1 - 2 / 64)^20) = 30.1, mean over three layers."""
    build(tmp_path, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=16)
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cpu", memory_bytes=2**26, debug=("uniform-routing",)
    )
    engine = GenerationEngine(config)
    clear_routing_record()
    assert mean_experts_used() == {}
    decode(engine, 20)
    assert set(mean_experts_used()) == {60, 20}, "the prompts' step, and those that decode"
    assert mean_experts_used()[20] == pytest.approx(30.1, abs=4.5)
    clear_routing_record()
    assert mean_experts_used() == {}, "steps before are not counted again"


def test_latest_step_of_a_size_counts_each_expert_once_per_layer() -> None:
    set_uniform_routing(True, 3)
    assert uniform_routing_seed() == 3
    record_routing(0, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    record_routing(0, torch.tensor([[5, 1], [1, 5]], dtype=torch.int32))
    record_routing(1, torch.tensor([[5, 1], [1, 4]], dtype=torch.int32))
    record_routing(1, torch.tensor([[7, 1]], dtype=torch.int32))
    assert mean_experts_used() == {1: 2.0, 2: 2.5}


def test_ordinary_routing_counts_no_experts() -> None:
    set_uniform_routing(True, 3)
    record_routing(0, torch.zeros(1, 2, dtype=torch.int32))
    set_uniform_routing(False, 3)
    assert uniform_routing_seed() is None
    assert uniform_routing._topk_ids == {}


@pytest.mark.parametrize(
    ("used", "valid"), [(222.0, True), (211.5, True), (211.0, False), (40.0, False), (234.0, False)]
)
def test_benchmark_row_is_valid_within_5_percent_of_the_expected_experts(
    used: float, valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(ROOT / "benchmarks")])
    from bench_output import Row
    from uniform_routing import ExpertsUsed, expected_experts, record

    row = Row(work="64 requests", unit="output tokens/s", value=1.0)
    record(row, ExpertsUsed(64, used, expected_experts(256, 8, 64)))
    assert row.experts_expected == pytest.approx(222.4, abs=0.1)
    assert (row.invalid is None) == valid
    record(row, None)
    assert row.invalid == "the number of experts is not on record"
