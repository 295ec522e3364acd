"""The memory plan: recurrent states, and settings that do not fit."""

from __future__ import annotations

from pathlib import Path

import engine_tools as tools
import hybrid_tools
import pytest
import torch

from meltcore.common.errors import BudgetError, ConfigError
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.engine.memory.memory_plan import RECURRENT_FRACTION, smallest_budget

SLOT_BYTES = 2 * (4 * hybrid_tools.CHANNELS + 2 * 16 * 16) * 4
PAGE_BYTES = 2 * 64 * 2 * 32 * 4


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, left: int, **settings: object) -> GenerationEngine:
    """An engine whose weights and reserve leave `left` bytes."""
    weights = 4 * sum(parameter.numel() for parameter in hybrid_tools.Hybrid(hybrid_tools.CONFIG).parameters())
    settings = {"max_num_seqs": None, "max_model_len": 128, **settings}
    return hybrid_tools.open_hybrid(
        folder, monkeypatch, memory_bytes=int((weights + left) / 0.92) + 2, **settings
    ).engine


def test_planned_slot_bytes_equal_the_allocated_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path, monkeypatch, 2**24, max_num_seqs=8)
    conv, states = engine.runner.caches[0]
    assert len(states) == engine.states.total + 1  # type: ignore[union-attr]
    recurrent = sorted(hybrid_tools.RECURRENT)
    laid_out = sum(tensor.nbytes for layer in recurrent for tensor in engine.runner.caches[layer])
    (row,) = [row for row in engine.memory if row.name == "recurrent states"]
    assert row.size_bytes == laid_out == SLOT_BYTES * len(states)
    assert conv.dtype is states.dtype is torch.float32


def test_recurrent_states_take_their_fraction_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = 40 * SLOT_BYTES
    engine = opened(tmp_path, monkeypatch, left)
    (row,) = [row for row in engine.memory if row.name == "recurrent states"]
    assert left * RECURRENT_FRACTION - SLOT_BYTES < row.size_bytes <= left * RECURRENT_FRACTION
    assert 8 <= engine.max_num_seqs < engine.states.total  # type: ignore[union-attr]
    assert engine.ready().max_num_seqs == engine.max_num_seqs


def test_too_many_sequences_are_refused_with_the_number_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 40 * SLOT_BYTES
    with pytest.raises(ConfigError, match=r"--max-num-seqs \d+ or less, or raise --memory") as refused:
        opened(tmp_path, monkeypatch, left, max_num_seqs=60)
    most = int(str(refused.value).split("--max-num-seqs ")[1].split()[0])
    assert opened(tmp_path, monkeypatch, left, max_num_seqs=most).max_num_seqs == most
    with pytest.raises(ConfigError):
        opened(tmp_path, monkeypatch, left, max_num_seqs=most + 1)


def test_too_long_context_is_refused_with_one_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = 4 * PAGE_BYTES + 12 * SLOT_BYTES
    with pytest.raises(ConfigError, match=r"--max-model-len \d+ or less") as refused:
        opened(tmp_path, monkeypatch, left, max_num_seqs=4, max_model_len=1024)
    longest = int(str(refused.value).split("Set --max-model-len ")[1].split()[0])
    assert opened(tmp_path, monkeypatch, left, max_num_seqs=4, max_model_len=longest).max_model_len == longest


def test_no_snapshot_slots_without_a_prefix_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path, monkeypatch, 2**24, max_num_seqs=8, enable_prefix_caching=False)
    assert engine.states.total == 8  # type: ignore[union-attr]


def test_scratch_of_quantized_weights_leaves_less_for_pages() -> None:
    """As many pages as its bytes, a row of its own, and a name in the refusal."""
    memory, scratch = 8 * 2**30, 2**27
    plain, quantized = (tools.plan_of_qwen(memory, scratch_bytes=each) for each in (0, scratch))
    assert "scratch" not in {row.name for row in plain.rows}
    rows = {row.name: row.size_bytes for row in quantized.rows}
    assert rows["scratch"] == scratch
    assert plain.pages - quantized.pages in (scratch // plain.page_bytes, scratch // plain.page_bytes + 1)
    assert sum(rows.values()) <= memory
    with pytest.raises(ConfigError, match=r"scratch of quantized weights \(128 MiB\)"):
        tools.plan_of_qwen(2**30 + 2**28, scratch_bytes=scratch)


@pytest.mark.parametrize(
    ("error", "found"), [(BudgetError("too little"), 9 * 2**20), (ConfigError("a bad setting"), None)]
)
def test_only_a_budget_that_is_too_small_makes_the_search_go_on(error: ConfigError, found: int | None) -> None:
    """Every error of a setting counted as too little memory, and its own text was lost."""

    def is_enough(num_bytes: int) -> bool:
        if num_bytes < 9 * 2**20:
            raise error
        return True

    if found is not None:
        assert smallest_budget(is_enough, 64 * 2**20) == found
        return
    with pytest.raises(ConfigError, match="a bad setting"):
        smallest_budget(is_enough, 64 * 2**20)
