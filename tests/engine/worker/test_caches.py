"""Recurrent states on the device: the table of slots that graphs read, and copies between slots."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import pytest
import torch

from meltcore.engine.core.batch import RecurrentBatch
from meltcore.engine.worker.caches import RecurrentStateCache
from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.gated_delta.common import GatedDeltaParams, GatedDeltaShape
from meltcore.kernels.gated_delta.layer import gated_delta_net
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


SHAPE = GatedDeltaShape(key_heads=1, heads=2, key_dim=4, value_dim=4, kernel=4)
CPU = torch.device("cpu")


def states_of(window: int) -> RecurrentStateCache:
    spec = RecurrentStateSpec(SHAPE.conv_channels, SHAPE.kernel, *SHAPE[1:4])
    return RecurrentStateCache(spec, 2, slots=4, rows=5, dtype=torch.float32, device=CPU, window=window)


class Layers:
    """Two recurrent layers and their states. The tokens of a sequence are the same in both."""

    def __init__(self, window: int) -> None:
        self.states = states_of(window)
        generator = torch.Generator().manual_seed(1)
        self.weights = [
            [torch.randn(size, generator=generator) for size in ((SHAPE.conv_channels, 4), 2, 2, 4)] for _ in range(2)
        ]

    def step(self, chunks: Sequence[tuple[int, int, torch.Tensor]], num_windows: int, **copies: Pairs) -> torch.Tensor:
        """The outputs of chunks (slot, position, inputs [tokens, width]): [tokens, layers, heads * value_dim]."""
        sizes = [len(inputs) for _, _, inputs in chunks]
        batch = state_step([slot for slot, _, _ in chunks], **copies)
        batch = batch._replace(first_tokens=np.array([0, *accumulate(sizes)]), num_windows=num_windows)
        self.states.restore_snapshots(batch)
        slots, first_tokens, _ = self.states.attention_inputs(batch, torch.arange(len(chunks)))
        context_lens, unused = torch.tensor([position for _, position, _ in chunks]), torch.zeros(0)
        fields = {"num_windows": 0}
        if self.states.has_windows:
            replay_lens = self.states.count_replays(slots, context_lens, first_tokens, num_windows)
            fields = {"num_windows": num_windows, "replay_lens": replay_lens}
        metadata = AttentionMetadata(
            *(unused, unused, context_lens, unused, 0 if fields["num_windows"] else num_windows, unused, unused, []),
            *(slots, first_tokens, unused),
            **fields,
        )
        projected, outs = torch.cat([inputs for _, _, inputs in chunks]), []
        for layer, (conv, a_log, dt_bias, norm) in enumerate(self.weights):
            params = GatedDeltaParams(conv, a_log, dt_bias, norm, 1e-6, SHAPE.key_heads, *self.states.layer(layer))
            outs.append(gated_delta_net(projected, params, metadata))
        self.states.take_snapshots(batch)
        return torch.stack(outs, 1)


def test_rejected_drafts_leave_no_trace() -> None:
    """Also in snapshots of states whose drafts wait to be replayed, and where another sequence has the slot."""
    torch.manual_seed(2)
    one, other, wrong = (torch.randn(12, SHAPE.width) for _ in range(3))
    plain, layers = Layers(1), Layers(4)
    of_one = torch.cat([plain.step([(1, position, one[position, None])], 1) for position in range(12)])
    of_other = torch.cat([plain.step([(2, position, other[position, None])], 1) for position in range(12)])

    def check(out: torch.Tensor, *expected: torch.Tensor) -> None:
        torch.testing.assert_close(out, torch.cat(expected), rtol=1e-4, atol=1e-4)

    check(layers.step([(1, 0, one[:5])], 0), of_one[:5])
    out = layers.step([(1, 5, torch.cat([one[5:8], wrong[:1]]))], 1)  # two drafts of three are accepted
    check(out[:3], of_one[5:8])
    assert layers.states.folded[1] == 6
    out = layers.step([(1, 8, torch.cat([one[8:10], wrong[:2]]))], 1, snapshots=[(1, 3)])
    check(out[:2], of_one[8:10])
    check(layers.step([(1, 0, other[:6])], 0), of_other[:6])
    out = layers.step([(1, 6, other[6:9]), (2, 10, one[10:])], 2, restores=[(3, 2)])
    check(out, of_other[6:9], of_one[10:])
    check(layers.step([(1, 7, other[7:9]), (4, 0, one[:3])], 1), of_other[7:9], of_one[:3])
    assert layers.states.folded.tolist() == [0, 8, 11, 9, 3]


def test_padding_replays_nothing_and_changes_no_sequence() -> None:
    states = states_of(4)
    states.folded[:] = torch.tensor([7, 5, 9, 2, 0])
    slots, context_lens = torch.tensor([2, 0, 0, 3]), torch.tensor([10, -1, -1, 0])
    replay_lens = states.count_replays(slots, context_lens, torch.tensor([0, 2, 3, 4, 9]), 3)
    assert replay_lens[0] == 1
    assert states.folded[1:].tolist() == [5, 11, 5, 0]


def test_slot_bytes_of_windows_equal_the_allocated_bytes() -> None:
    states = states_of(3)
    spec = RecurrentStateSpec(SHAPE.conv_channels, SHAPE.kernel, *SHAPE[1:4])
    assert 2 * spec.slot_bytes(4, 3) == (states.conv.nbytes + states.states.nbytes) // 5
