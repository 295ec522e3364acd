"""Cache groups of models: which layers share a page."""

from __future__ import annotations

import pytest

from meltcore.common.errors import ConfigError
from meltcore.models.decoders.kv_cache_specs import (
    FullAttentionSpec,
    KVCacheSpec,
    RecurrentStateSpec,
    SlidingWindowSpec,
    group_layers,
)

FULL, SLIDING = FullAttentionSpec(4, 32), SlidingWindowSpec(4, 32, 96)
RECURRENT = RecurrentStateSpec(64, 4, 2, 16, 16)


def test_one_group_has_all_layers_in_a_page() -> None:
    for spec in (FULL, SLIDING):
        groups = group_layers([RECURRENT, spec, spec, RECURRENT, spec])
        assert groups.sub_groups == ((1, 2, 4),)
        assert groups.page_bytes(64, 2) == 3 * 2 * 64 * 4 * 32 * 2
        assert groups.recurrent_layers == (0, 3)


def test_groups_are_cut_into_sub_groups_of_one_size() -> None:
    """Layers 2 and 5 are global: two sub-groups of two local layers each."""
    groups = group_layers([SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL])
    assert groups.layers_per_page == 2
    assert groups.sub_groups == ((2, 5), (0, 1), (3, 4))
    assert [group.window for group in groups.attention] == [None, 96]


def test_groups_without_a_common_divisor_have_a_layer_per_page() -> None:
    groups = group_layers([SLIDING] * 4 + [FULL] * 3 + [SlidingWindowSpec(4, 32, 64)] * 2)
    assert groups.layers_per_page == 1
    assert [len(layers) for layers in groups.sub_groups] == [1] * 9
    assert [group.window for group in groups.attention] == [None, 96, 64]


def test_keys_of_one_size_may_have_other_heads() -> None:
    groups = group_layers([FULL, SlidingWindowSpec(2, 64, 96)])
    assert groups.page_bytes(64, 2) == 2 * 64 * 128 * 2


@pytest.mark.parametrize("window", [0, -1])
def test_window_without_a_token_is_refused(window: int) -> None:
    with pytest.raises(ConfigError, match=rf"sliding window of layer 1 must be 1 or more; got {window}"):
        group_layers([FULL, SlidingWindowSpec(4, 32, window)])


@pytest.mark.parametrize("other", [FullAttentionSpec(4, 64), SlidingWindowSpec(2, 32, 96)])
def test_keys_of_two_sizes_are_refused(other: KVCacheSpec) -> None:
    with pytest.raises(ConfigError, match=r"layer 0 has 4 heads of 32, layer 2 has \d heads of \d\d"):
        group_layers([FULL, FULL, other])


def test_ring_has_room_for_two_windows() -> None:
    assert RECURRENT.ring_shape(1) == (4, 64)
    assert RECURRENT.ring_shape(4) == (10, 68)
    groups = group_layers([RECURRENT, FULL, RECURRENT])
    assert groups.slot_bytes(2, 4) - groups.slot_bytes(2) == 2 * 2 * (10 * 68 - 4 * 64)


def test_model_without_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="one kind of attention or more"):
        group_layers([RECURRENT])
    with pytest.raises(ValueError, match="at most one of recurrent layers"):
        group_layers([FULL, RECURRENT, RECURRENT._replace(heads=4)])
