"""States on the device: the table of slots that graphs read, and copies from slot to slot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from meltcore.engine.batch import StateStep
from meltcore.engine.state_cache import StateCache
from meltcore.models.cache import StateGroup

Pairs = Sequence[tuple[int, int]]
GROUP = StateGroup(layers=2, conv_channels=6, conv_width=4, heads=2, key_dim=3, value_dim=5)


@pytest.fixture
def cache() -> StateCache:
    return StateCache(GROUP, slots=4, rows=5, dtype=torch.bfloat16, device=torch.device("cpu"))


def state_step(slots: list[int], restores: Pairs = (), snapshots: Pairs = ()) -> StateStep:
    """A step in which every sequence has one token."""
    pieces = np.zeros((0, 2), dtype=np.int32)
    return StateStep(slots, np.arange(len(slots) + 1), pieces, list(restores), list(snapshots))


def test_rows_have_the_slots_of_their_newest_step_and_padding_the_null_slot(cache: StateCache) -> None:
    cache.begin(state_step([4, 2]), torch.tensor([1, 3]))
    cache.begin(state_step([1]), torch.tensor([3]))
    assert cache.slots(torch.tensor([3, 1, 0, 0])).tolist() == [1, 4, 0, 0]


def test_a_layers_slots_are_views_of_the_cache(cache: StateCache) -> None:
    conv, states = cache.layer(1)
    assert conv.shape == (5, 4, 6)
    assert states.shape == (5, 2, 3, 5)
    states[3] = 1.0
    assert cache.states[3, 1].all()
    assert not cache.states[3, 0].any()
    assert (conv.dtype, states.dtype) == (torch.bfloat16, torch.float32)


def test_restores_come_before_a_step_and_snapshots_after_it_each_in_order(cache: StateCache) -> None:
    """Slot 2 is a snapshot that is restored to 1 and then evicted: another is restored to it."""
    for slot in range(5):
        cache.conv[slot], cache.states[slot] = slot, slot
    step = state_step([1, 2], restores=[(2, 1), (3, 2)], snapshots=[(1, 4)])
    cache.restore(step)
    cache.begin(step, torch.tensor([1, 2]))
    assert cache.states[:, 0, 0, 0, 0].tolist() == [0, 2, 3, 3, 4]
    cache.states[1], cache.conv[1] = 9, 9
    cache.keep(step)
    for content in (cache.states[:, -1, -1, -1, -1], cache.conv[:, -1, -1, -1]):
        assert content.tolist() == [0, 9, 3, 3, 9]


def test_slot_bytes_count_the_convolution_in_the_models_type(cache: StateCache) -> None:
    assert GROUP.slot_bytes(2) == (cache.conv.nbytes + cache.states.nbytes) // 5
