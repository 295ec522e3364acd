"""Gated DeltaNet's reference implementation against transformers and against itself in other chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gated_delta_tools import SMALL, Slots, distance, make_metadata, make_params
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as published
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

from meltcore.kernels.gated_delta.common import GatedDeltaParams, make_chunk_indices
from meltcore.kernels.gated_delta.layer import gated_delta_net

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
    params = GatedDeltaParams(
        *(layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias, layer.norm.weight, layer.norm.variance_epsilon),
        SMALL.key_heads,
        *Slots.make(2, SMALL, torch.float32, CPU),
    )
    products = [layer.in_proj_qkv, layer.in_proj_z, layer.in_proj_b, layer.in_proj_a]
    done, outs = 0, []
    for part in hidden.split(cuts):
        projected = torch.cat([product(part) for product in products], -1)
        metadata = make_metadata([len(part)], [done], [1], CPU)
        outs.append(gated_delta_net(projected, params, metadata))
        done += len(part)
    return layer.out_proj(torch.cat(outs))


@pytest.mark.parametrize("cuts", [[70], [1] * 9, [1, 2, 3, 4, 5], [64, 6], [3, 1, 66]], ids=str)
def test_every_chunking_of_a_sequence_gives_what_transformers_computes(layer: Any, cuts: list[int]) -> None:
    hidden = torch.randn(1, sum(cuts), HIDDEN)
    expected = layer(hidden)[0]
    result = ours(layer, hidden[0], cuts)
    assert distance(result, expected) < EXACT


def test_sequences_of_a_step_use_their_own_slots() -> None:
    """Several sequences, some of one token, one in a reused slot, give the results of each alone."""
    torch.manual_seed(1)
    params = make_params(SMALL, torch.float32, CPU)
    alone = Slots.make(6, SMALL, torch.float32, CPU)
    for slot in (2, 4, 5):
        gated_delta_net(torch.randn(7, SMALL.width), alone.of(params), make_metadata([7], [0], [slot], CPU))
    together = alone.clone()
    sizes, starts, used = [1, 1, 5, 66], [7, 0, 7, 0], [4, 1, 2, 5]
    projected = torch.randn(sum(sizes), SMALL.width)
    result = gated_delta_net(projected, together.of(params), make_metadata(sizes, starts, used, CPU))
    parts = []
    for part, size, start, slot in zip(projected.split(sizes), sizes, starts, used, strict=True):
        parts.append(gated_delta_net(part, alone.of(params), make_metadata([size], [start], [slot], CPU)))
    torch.testing.assert_close(result, torch.cat(parts))
    for one, other in zip(together, alone, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)
    assert together.states[[0, 3]].isnan().all()


def test_padding_of_a_graph_gives_zeros_and_changes_no_sequence() -> None:
    torch.manual_seed(2)
    params = make_params(SMALL, torch.float32, CPU)
    slots = Slots(torch.randn(3, SMALL.kernel, SMALL.conv_channels), torch.randn(3, *SMALL[1:4]))
    before = slots.clone()
    projected = torch.randn(3, SMALL.width)
    metadata = make_metadata([1, 1, 1], [9, -1, -1], [2, 0, 0], CPU)
    result = gated_delta_net(projected, slots.of(params), metadata)
    assert result.ne(0).all(1).tolist() == [True, False, False]
    assert result[1:].eq(0).all()
    assert torch.equal(slots.states[1], before.states[1])
    assert not torch.equal(slots.states[2], before.states[2])
    changed = (slots.conv_states[2] != before.conv_states[2]).all(1)
    assert changed.tolist() == [False, True, False, False]  # 9 % 4: one entry of the ring


def test_chunks_cover_every_longer_sequence_once() -> None:
    assert make_chunk_indices([1, 1, 2, 64, 65, 130], 2).tolist() == [
        [2, 0],
        [3, 0],
        *([4, 0], [4, 1]),
        *([5, 0], [5, 1], [5, 2]),
    ]
    assert make_chunk_indices([1, 1], 2).shape == (0, 2)


def test_ring_of_the_wrong_length_is_refused() -> None:
    params = make_params(SMALL, torch.float32, CPU)
    slots = Slots.make(2, SMALL._replace(kernel=3), torch.float32, CPU)
    with pytest.raises(ValueError, match="must hold 4 inputs"):
        gated_delta_net(torch.randn(1, SMALL.width), slots.of(params), make_metadata([1], [0], [1], CPU))
