"""The layers that a rehearsal runs: each kind, after each kind that it follows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from meltcore.models.checkpoint import open_checkpoint
from meltcore.models.decoder import Block, Decoder, layers_of_all_kinds
from meltcore.models.loader import build_meta_model


def pairs(kinds: Sequence[str]) -> set[tuple[str, str]]:
    return set(zip(["start", *kinds], [*kinds, "end"], strict=True))


@pytest.mark.parametrize("seed", range(20))
def test_every_kind_runs_after_each_that_it_follows(seed: int) -> None:
    rng = random.Random(seed)
    kinds = rng.choices("abc", k=rng.randint(1, 40))
    chosen = layers_of_all_kinds(kinds)
    assert pairs(kinds) <= pairs([kinds[index] for index in chosen])
    assert chosen == sorted(set(chosen))


def test_equal_layers_run_three_times() -> None:
    assert layers_of_all_kinds("a" * 28) == [0, 1, 27]
    assert layers_of_all_kinds("gggf" * 10) == [0, 1, 2, 3, 4, 39]


def decoder(name: str) -> Decoder:
    model = build_meta_model(open_checkpoint(name, files="config"), torch.float32, torch.device("cpu"))
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize("name", ["meltcore/sums", "meltcore/sums-gemma", "meltcore/sums-hybrid"])
def test_kinds_are_those_of_the_configuration(name: str) -> None:
    model = decoder(name)
    sliding, recurrent = model.config.sliding_layers, model.config.recurrent
    kinds = [
        (index in sliding, recurrent is not None and index in recurrent.layers) for index in range(len(model.blocks))
    ]
    assert model._layers_of_all_kinds == set(layers_of_all_kinds(kinds))


def test_a_layer_of_other_shape_or_setting_is_another_kind() -> None:
    model = decoder("meltcore/sums")
    same = len(model._layers_of_all_kinds)
    for change in ("shape", "setting"):
        other = decoder("meltcore/sums")
        middle = other.blocks[len(other.blocks) // 2]
        assert isinstance(middle, Block)
        if change == "shape":
            weight = middle.mlp.norm.weight
            middle.mlp.norm.weight = torch.nn.Parameter(weight.new_empty(len(weight) + 1))
        else:
            middle.mlp.norm.eps *= 2
        assert len(other._layers_of_all_kinds) > same


def test_layers_are_skipped_within_the_context_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder("meltcore/sums")
    ran: list[Block] = []

    def forward(block: Block, *_: Any) -> None:
        ran.append(block)

    monkeypatch.setattr(Block, "forward", forward)
    tokens, metadata = torch.zeros(3, dtype=torch.int64, device="meta"), [FakeMetadata()] * len(model.blocks)
    caches = [(tokens, tokens)] * len(model.blocks)
    with model.one_layer_per_kind():
        model(tokens, tokens, caches, metadata)
    assert [block for index, block in enumerate(model.blocks) if index in model._layers_of_all_kinds] == ran
    ran.clear()
    model(tokens, tokens, caches, metadata)
    assert list(model.blocks) == ran


class FakeMetadata:
    num_decodes = 0
