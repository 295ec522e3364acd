"""The layers that run for their kernels alone: each kind, after each kind that it follows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import PUBLISHED_CONFIG_FOLDERS, open_checkpoint
from meltcore.models.decoders.decoder import Decoder, DecoderBlock, layers_of_all_kinds
from meltcore.models.loader import build_meta_model
from meltcore.models.quantized.quantization import quantize_as_stored, tensors_of_layers


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


def decoder(name: str, rank: int | None = None) -> Decoder:
    """A model without weights. rank: of two that share it."""
    group = None if rank is None else TensorParallelGroup(rank, 2)
    model = build_meta_model(open_checkpoint(name, files="config"), torch.bfloat16, META, group=group)
    assert isinstance(model, Decoder)
    return model


def metadata_of(tokens: torch.Tensor) -> AttentionMetadata:
    return AttentionMetadata(*[tokens] * 4, 0, *[tokens] * 2, [], *[tokens] * 3)  # type: ignore[arg-type]


META = torch.device("meta")
TOKENS = torch.zeros(3, dtype=torch.int64, device=META)


# A rank of an FP8 checkpoint takes up to 9 s to build, and has the layers of the same model in 16 bits.
CASES = [
    (name, rank)
    for name in (*PUBLISHED_CONFIG_FOLDERS, "meltcore/sums", "meltcore/sums-gemma", "meltcore/sums-hybrid")
    for rank in (None, 0, 1)
    if rank is None or not name.endswith("-FP8")
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "rank"), CASES)
def test_kinds_are_those_of_the_configuration(name: str, rank: int | None) -> None:
    """On each rank: where the number of layers differed, one would wait for another's reduction."""
    fields = open_checkpoint(name, files="config").config
    if rank is not None and any(fields.get(size, 2) % 2 for size in ("num_attention_heads", "vocab_size")):
        pytest.skip("two ranks cannot share an odd number of heads or tokens")
    model = decoder(name, rank)
    sliding, recurrent = model.config.sliding_layers, model.config.recurrent
    kinds = [
        (index in sliding, recurrent is not None and index in recurrent.layers) for index in range(len(model.blocks))
    ]
    assert layers_of_all_kinds(model._kinds) == layers_of_all_kinds(kinds)
    assert len(set(model._kinds)) == len(set(kinds)) <= 2


def test_a_layer_of_other_shape_or_setting_is_another_kind() -> None:
    for change in ("shape", "setting"):
        other = decoder("meltcore/sums")
        middle = other.blocks[len(other.blocks) // 2]
        assert isinstance(middle, DecoderBlock)
        assert len(set(other._kinds)) == 1
        del other._kinds
        if change == "shape":
            weight = middle.mlp.norm.weight
            middle.mlp.norm.weight = torch.nn.Parameter(weight.new_empty(len(weight) + 1))
        else:
            middle.mlp.norm.eps *= 2
        assert other._kinds == [0, 0, 1, 0]


@pytest.mark.parametrize("part", ["v_proj", "o_proj", "down_proj"])
@pytest.mark.parametrize("stored", ["Q6_K", "BF16"])
def test_a_layer_of_another_format_is_another_kind(part: str, stored: str) -> None:
    """As in GGUF files, where some layers have more bits, and in published files that leave some unquantized."""
    model = decoder("Qwen/Qwen3-0.6B")
    formats = {name: "Q4_K" for _, names in tensors_of_layers(model) for name in names}
    for name in formats:
        if f"layers.7.{'mlp' if part == 'down_proj' else 'self_attn'}.{part}" in name:
            formats[name] = stored
    assert sorted(formats.values()).count(stored) == 1
    with META:
        quantize_as_stored(model, formats)
    assert layers_of_all_kinds(model._kinds) == [0, 1, 6, 7, 8, 27]


def run(model: Decoder, metadata: Sequence[AttentionMetadata], caches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    model(TOKENS, TOKENS, caches, list(metadata))


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[DecoderBlock]:
    """The blocks that run, which compute nothing."""
    blocks: list[DecoderBlock] = []

    def forward(block: DecoderBlock, *_: Any) -> None:
        blocks.append(block)

    monkeypatch.setattr(DecoderBlock, "forward", forward)
    return blocks


def test_layers_are_skipped_within_the_context_only(ran: list[DecoderBlock]) -> None:
    model = decoder("Qwen/Qwen3-0.6B")
    metadata, caches = [metadata_of(TOKENS)] * len(model.blocks), [(TOKENS, TOKENS)] * len(model.blocks)
    with model.one_layer_per_kind():
        run(model, metadata, caches)
    assert ran == [model.blocks[index] for index in (0, 1, 27)]
    ran.clear()
    run(model, metadata, caches)
    assert ran == list(model.blocks)


@pytest.mark.parametrize("unaligned", ["metadata", "cache"])
def test_a_layer_whose_tensors_have_another_alignment_runs(unaligned: str, ran: list[DecoderBlock]) -> None:
    """Triton compiles another kernel for it: a sub-group's slots of an odd number of tokens begin in a 16-byte line."""
    model = decoder("Qwen/Qwen3-0.6B")
    aligned = torch.zeros(4, dtype=torch.int64)
    assert aligned.data_ptr() % 16 == 0
    metadata, caches = [metadata_of(aligned[:3])] * len(model.blocks), [(aligned, aligned)] * len(model.blocks)
    if unaligned == "metadata":
        metadata[7] = metadata[7]._replace(slot_mapping=aligned[1:])
    else:
        caches[7] = aligned, aligned[1:]
    with model.one_layer_per_kind():
        run(model, metadata, caches)
    assert ran == [model.blocks[index] for index in (0, 1, 6, 7, 8, 27)]
