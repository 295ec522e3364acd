"""What recurrent states take of the memory, and what is refused."""

from __future__ import annotations

from pathlib import Path

import hybrid_tools
import pytest
import torch

from meltcore.engine.engine import Engine
from meltcore.engine.memory import STATE_SHARE
from meltcore.errors import ConfigError

SLOT_BYTES = 2 * (4 * hybrid_tools.CHANNELS + 2 * 16 * 16) * 4
PAGE_BYTES = 2 * 64 * 2 * 32 * 4


def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, room: int, **settings: object) -> Engine:
    """An engine whose weights and reserve leave `room` bytes."""
    weights = 4 * sum(parameter.numel() for parameter in hybrid_tools.Hybrid(hybrid_tools.CONFIG).parameters())
    settings = {"max_num_seqs": None, "max_model_len": 128, **settings}
    return hybrid_tools.open_hybrid(
        folder, monkeypatch, memory_bytes=int((weights + room) / 0.92) + 2, **settings
    ).engine


def test_a_slot_is_counted_as_it_is_laid_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path, monkeypatch, 2**24, max_num_seqs=8)
    conv, states = engine.runner.caches[0]
    assert len(states) == engine.states.total + 1  # type: ignore[union-attr]
    recurrent = sorted(hybrid_tools.RECURRENT)
    laid_out = sum(tensor.nbytes for layer in recurrent for tensor in engine.runner.caches[layer])
    (row,) = [row for row in engine.memory if row.name == "recurrent states"]
    assert row.size_bytes == laid_out == SLOT_BYTES * len(states)
    assert conv.dtype is states.dtype is torch.float32


def test_sequences_and_snapshots_share_half_of_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 40 * SLOT_BYTES
    engine = opened(tmp_path, monkeypatch, room)
    (row,) = [row for row in engine.memory if row.name == "recurrent states"]
    assert room * STATE_SHARE - SLOT_BYTES < row.size_bytes <= room * STATE_SHARE
    assert 8 <= engine.max_num_seqs < engine.states.total  # type: ignore[union-attr]
    assert engine.ready().max_num_seqs == engine.max_num_seqs


def test_as_many_sequences_as_asked_for_or_a_refusal_that_says_how_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 40 * SLOT_BYTES
    with pytest.raises(ConfigError, match=r"--max-num-seqs \d+ or less, or raise --memory") as refused:
        opened(tmp_path, monkeypatch, room, max_num_seqs=60)
    most = int(str(refused.value).split("--max-num-seqs ")[1].split()[0])
    assert opened(tmp_path, monkeypatch, room, max_num_seqs=most).max_num_seqs == most
    with pytest.raises(ConfigError):
        opened(tmp_path, monkeypatch, room, max_num_seqs=most + 1)


def test_too_long_a_context_is_refused_with_one_that_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = 4 * PAGE_BYTES + 12 * SLOT_BYTES
    with pytest.raises(ConfigError, match=r"--max-model-len \d+ or less") as refused:
        opened(tmp_path, monkeypatch, room, max_num_seqs=4, max_model_len=1024)
    longest = int(str(refused.value).split("Set --max-model-len ")[1].split()[0])
    assert opened(tmp_path, monkeypatch, room, max_num_seqs=4, max_model_len=longest).max_model_len == longest


def test_no_slots_for_snapshots_without_a_prefix_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = opened(tmp_path, monkeypatch, 2**24, max_num_seqs=8, debug=("no-prefix-cache",))
    assert engine.states.total == 8  # type: ignore[union-attr]
