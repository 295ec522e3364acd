"""`--debug uniform-routing`: experts drawn all alike, and how many of them a step met."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_routed_experts import build

from meltcore.config import EngineConfig
from meltcore.engine.engine import Engine
from meltcore.engine.messages import AddRequest
from meltcore.engine.sampling_params import SamplingParams
from meltcore.layers import uniform_routing
from meltcore.layers.uniform_routing import drawing_seed, experts_met, forget_drawn, note_drawn, route_at_random


@pytest.fixture(autouse=True)
def _routed_by_the_router_afterwards() -> Iterator[None]:
    yield
    route_at_random(False, 0)


def decode(engine: Engine, sequences: int) -> None:
    for number in range(sequences):
        engine.add(AddRequest(f"{number}", [1, 2, number], SamplingParams(max_tokens=3, ignore_eos=True)))
    while engine.has_work:
        engine.step()


def test_a_decode_step_tells_how_many_experts_it_met(tmp_path: Path) -> None:
    """Of 64 experts, 2 for each of 20 tokens: 64 (1 - (1 - 2 / 64)^20) = 30.1, mean over three layers."""
    build(tmp_path, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=16)
    config = EngineConfig(
        model=str(tmp_path), load_format="dummy", device="cpu", memory_bytes=2**26, debug=("uniform-routing",)
    )
    engine = Engine(config)
    forget_drawn()
    assert experts_met() == {}
    decode(engine, 20)
    assert set(experts_met()) == {60, 20}, "the prompts' step, and those that decode"
    assert experts_met()[20] == pytest.approx(30.1, abs=4.5)
    forget_drawn()
    assert experts_met() == {}, "what was before is not told again"


def test_experts_of_each_layer_count_once_and_the_latest_step_of_a_size_counts() -> None:
    route_at_random(True, 3)
    assert drawing_seed() == 3
    note_drawn(0, torch.tensor([[0, 1], [2, 3]], dtype=torch.int32))
    note_drawn(0, torch.tensor([[5, 1], [1, 5]], dtype=torch.int32))
    note_drawn(1, torch.tensor([[5, 1], [1, 4]], dtype=torch.int32))
    note_drawn(1, torch.tensor([[7, 1]], dtype=torch.int32))
    assert experts_met() == {1: 2.0, 2: 2.5}


def test_routing_by_the_router_leaves_no_record() -> None:
    route_at_random(True, 3)
    note_drawn(0, torch.zeros(1, 2, dtype=torch.int32))
    route_at_random(False, 3)
    assert drawing_seed() is None
    assert uniform_routing._drawn == {}


@pytest.mark.parametrize(
    ("met", "valid"), [(222.0, True), (211.5, True), (211.0, False), (40.0, False), (234.0, False)]
)
def test_a_benchmark_s_row_counts_within_5_percent_of_what_draws_all_alike_meet(
    met: float, valid: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2] / "benchmarks")])
    from bench_output import Row
    from uniform_routing import Met, expected_experts, tell

    row = Row(work="64 requests", unit="output tokens/s", value=1.0)
    tell(row, Met(64, met, expected_experts(256, 8, 64)))
    assert row.experts_expected == pytest.approx(222.4, abs=0.1)
    assert (row.invalid is None) == valid
    tell(row, None)
    assert row.invalid == "the experts met are not on record"
