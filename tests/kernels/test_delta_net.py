"""Gated DeltaNet as it is specified, its torch bodies, against transformers and against itself cut otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from delta_tools import SMALL, Slots, distance, make_segments, make_weights
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as published
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from meltcore.kernels.delta import DeltaWeights
from meltcore.kernels.delta_net import delta_chunks, delta_net

CPU = torch.device("cpu")
HIDDEN = 24
EXACT = 2e-6  # relative distance of two float32 computations in another order


@pytest.fixture
def layer() -> Any:
    torch.manual_seed(0)
    config = Qwen3_5MoeTextConfig(
        hidden_size=HIDDEN,
        linear_num_key_heads=SMALL.key_heads,
        linear_num_value_heads=SMALL.heads,
        linear_key_head_dim=SMALL.key_dim,
        linear_value_head_dim=SMALL.value_dim,
        linear_conv_kernel_dim=SMALL.kernel,
        num_hidden_layers=4,
    )
    layer = published.Qwen3_5MoeGatedDeltaNet(config, 0).eval().requires_grad_(False)
    for parameter in layer.parameters():
        parameter.normal_(std=0.5)
    layer.norm.weight.add_(1)
    layer.A_log.uniform_(-3, 2.5)
    return layer


def ours(layer: Any, hidden: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    """The layer's output for hidden [tokens, HIDDEN] of one sequence, in steps of `cuts` tokens."""
    weights = DeltaWeights(
        layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias, layer.norm.weight, layer.norm.variance_epsilon
    )
    slots = Slots.make(2, SMALL, torch.float32, CPU)
    products = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
    done, outs = 0, []
    for part in hidden.split(cuts):
        projected = torch.cat([product(part) for product in products], -1)
        segments = make_segments([len(part)], [done], [1], CPU)
        outs.append(delta_net(projected, weights, *slots, segments, SMALL.key_heads))
        done += len(part)
    return layer.out_proj(torch.cat(outs))


@pytest.mark.parametrize("cuts", [[70], [1] * 9, [1, 2, 3, 4, 5], [64, 6], [3, 1, 66]], ids=str)
def test_every_cut_of_a_sequence_gives_what_transformers_computes(layer: Any, cuts: list[int]) -> None:
    hidden = torch.randn(1, sum(cuts), HIDDEN)
    expected = layer(hidden)[0]
    result = ours(layer, hidden[0], cuts)
    assert distance(result, expected) < EXACT


def test_sequences_of_a_step_keep_to_their_slots() -> None:
    """Several at once, some of one token, one that begins anew in a used slot: as each alone."""
    torch.manual_seed(1)
    weights = make_weights(SMALL, torch.float32, CPU)
    alone = Slots.make(6, SMALL, torch.float32, CPU)
    for slot in (2, 4, 5):
        delta_net(torch.randn(7, SMALL.width), weights, *alone, make_segments([7], [0], [slot], CPU), SMALL.key_heads)
    together = alone.clone()
    sizes, starts, used = [1, 1, 5, 66], [7, 0, 7, 0], [4, 1, 2, 5]
    projected = torch.randn(sum(sizes), SMALL.width)
    result = delta_net(projected, weights, *together, make_segments(sizes, starts, used, CPU), SMALL.key_heads)
    parts = []
    for part, size, start, slot in zip(projected.split(sizes), sizes, starts, used, strict=True):
        parts.append(delta_net(part, weights, *alone, make_segments([size], [start], [slot], CPU), SMALL.key_heads))
    torch.testing.assert_close(result, torch.cat(parts))
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert together.states[[0, 3]].isnan().all()


def test_padding_of_a_graph_gives_zeros_and_touches_no_sequence() -> None:
    torch.manual_seed(2)
    weights = make_weights(SMALL, torch.float32, CPU)
    slots = Slots(torch.randn(3, SMALL.kernel, SMALL.conv_channels), torch.randn(3, *SMALL[1:4]))
    before = slots.clone()
    projected = torch.randn(3, SMALL.width)
    segments = make_segments([1, 1, 1], [9, -1, -1], [2, 0, 0], CPU)
    result = delta_net(projected, weights, *slots, segments, SMALL.key_heads)
    assert result.ne(0).all(1).tolist() == [True, False, False]
    assert result[1:].eq(0).all()
    assert torch.equal(slots.states[1], before.states[1])
    assert not torch.equal(slots.states[2], before.states[2])
    changed = (slots.conv_states[2] != before.conv_states[2]).all(1)
    assert changed.tolist() == [False, True, False, False]  # 9 % 4: one entry of the ring


def test_chunks_cover_every_longer_segment_once() -> None:
    assert delta_chunks([1, 1, 2, 64, 65, 130], 2).tolist() == [
        [2, 0],
        [3, 0],
        *([4, 0], [4, 1]),
        *([5, 0], [5, 1], [5, 2]),
    ]
    assert delta_chunks([1, 1], 2).shape == (0, 2)


def test_a_ring_of_the_wrong_length_is_refused() -> None:
    weights = make_weights(SMALL, torch.float32, CPU)
    slots = Slots.make(2, SMALL._replace(kernel=3), torch.float32, CPU)
    with pytest.raises(ValueError, match="must hold 4 inputs"):
        delta_net(torch.randn(1, SMALL.width), weights, *slots, make_segments([1], [0], [1], CPU), SMALL.key_heads)
