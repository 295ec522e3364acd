"""Recurrent states on the device: the table of slots that graphs read, and copies between slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from meltcore.engine.core.batch import RecurrentBatch
from meltcore.engine.worker.caches import RecurrentStateCache
from meltcore.models.decoders.kv_cache_specs import RecurrentStateSpec

Pairs = Sequence[tuple[int, int]]
SPEC = RecurrentStateSpec(conv_channels=6, conv_width=4, heads=2, key_dim=3, value_dim=5)


@pytest.fixture
def cache() -> RecurrentStateCache:
    return RecurrentStateCache(SPEC, 2, slots=4, rows=5, dtype=torch.bfloat16, device=torch.device("cpu"))


def state_step(slots: list[int], restores: Pairs = (), snapshots: Pairs = ()) -> RecurrentBatch:
    """A step in which every sequence has one token."""
    pieces = np.zeros((0, 2), dtype=np.int32)
    return RecurrentBatch(slots, np.arange(len(slots) + 1), pieces, list(restores), list(snapshots))


def test_rows_keep_the_slots_of_their_newest_step(cache: RecurrentStateCache) -> None:
    cache.attention_inputs(state_step([4, 2]), torch.tensor([1, 3]))
    cache.attention_inputs(state_step([1]), torch.tensor([3]))
    assert cache.slots(torch.tensor([3, 1, 0, 0])).tolist() == [1, 4, 0, 0]


def test_slots_of_a_layer_are_views_of_the_cache(cache: RecurrentStateCache) -> None:
    conv, states = cache.layer(1)
    assert conv.shape == (5, 4, 6)
    assert states.shape == (5, 2, 3, 5)
    states[3] = 1.0
    assert cache.states[3, 1].all()
    assert not cache.states[3, 0].any()
    assert (conv.dtype, states.dtype) == (torch.bfloat16, torch.float32)


def test_restores_and_snapshots_copy_in_order(cache: RecurrentStateCache) -> None:
    """Slot 2 is a snapshot that is restored to 1 and then evicted: another is restored to it."""
    for slot in range(5):
        cache.conv[slot], cache.states[slot] = slot, slot
    step = state_step([1, 2], restores=[(2, 1), (3, 2)], snapshots=[(1, 4)])
    cache.restore_snapshots(step)
    cache.attention_inputs(step, torch.tensor([1, 2]))
    assert cache.states[:, 0, 0, 0, 0].tolist() == [0, 2, 3, 3, 4]
    cache.states[1], cache.conv[1] = 9, 9
    cache.take_snapshots(step)
    for content in (cache.states[:, -1, -1, -1, -1], cache.conv[:, -1, -1, -1]):
        assert content.tolist() == [0, 9, 3, 3, 9]


def test_slot_bytes_equal_the_allocated_bytes(cache: RecurrentStateCache) -> None:
    assert 2 * SPEC.slot_bytes(2) == (cache.conv.nbytes + cache.states.nbytes) // 5
