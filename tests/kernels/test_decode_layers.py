"""The persistent kernel of all decode layers: specification, selection, and on a GPU its results."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from decode_layers import as_float

from meltcore.kernels.attention.metadata import AttentionMetadata, HeadNorms, PaddedGroup
from meltcore.kernels.norm import Norm, rms_norm_reference
from meltcore.kernels.persistent.decode_layers import (
    MAX_TOKENS,
    SIZES,
    DecodeLayer,
    DecodeLayers,
    decode_layers_reference,
    supports,
)
from meltcore.kernels.rotary import rotary_table
from meltcore.layers import decode_layers as selection
from meltcore.layers.fp8_weights import FP8_PER_CHANNEL
from meltcore.layers.norm import WideHeadNorms
from meltcore.models.decoders.decoder import Decoder
from meltcore.models.decoders.qwen3 import Qwen3

PAGE_SIZE, PAGES = 64, 8
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "vocab_size": 100,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}


@pytest.fixture
def model() -> Decoder:
    torch.manual_seed(0)
    model = Qwen3(TINY)
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    model.prepare(256)
    return model


def caches(model: Decoder) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    shape = (PAGES, PAGE_SIZE, 2, 16)
    return [(torch.randn(shape), torch.randn(shape)) for _ in model.blocks]


@pytest.fixture
def selected(monkeypatch: pytest.MonkeyPatch) -> list[list[DecodeLayer]]:
    """Layers for which the kernel is selected, as if it supported every size and device."""
    found: list[list[DecodeLayer]] = []

    def take(layers: list[DecodeLayer], rotary: torch.Tensor, scale: float) -> str:
        found.append(layers)
        return "selected"

    monkeypatch.setattr(selection, "supports", lambda layers: True)
    monkeypatch.setattr(selection, "DecodeLayers", take)
    return found


@pytest.mark.parametrize("position", [0, 63, 130])
def test_reference_computes_what_the_model_does(
    model: Decoder, selected: list[list[DecodeLayer]], position: int
) -> None:
    table, rows = torch.arange(PAGES).flip(0)[None], torch.zeros(1, dtype=torch.int64)
    positions, empty = torch.tensor([position]), torch.zeros(0, dtype=torch.int64)
    slot = table[0, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    groups = [PaddedGroup(0, 1, 0, 1, 1, position // PAGE_SIZE + 1)]
    metadata = AttentionMetadata(
        table, rows, positions, slot[None], 1, empty, torch.zeros(1, dtype=torch.int64), groups, empty, empty, empty
    )
    token, own_caches = torch.tensor([7]), caches(model)
    expected = model(token, positions, own_caches, [metadata] * 2)

    same_caches = caches(model)
    model.prepare_decode(same_caches)
    hidden = decode_layers_reference(
        selected[0], model.embedding(token).values, model.rotary, 16**-0.5, positions, table, rows
    )

    torch.testing.assert_close(rms_norm_reference(hidden, *model.norm.parameters_for_fusion()), expected)
    for (keys, values), (own_keys, own_values) in zip(same_caches, own_caches, strict=True):
        torch.testing.assert_close(keys, own_keys)
        torch.testing.assert_close(values, own_values)


@pytest.mark.parametrize(
    "change",
    [
        *("none", "bias", "window", "no head norm", "gelu", "post norm", "FP8", "sharded"),
        *("no norm before", "wide norms", "no rotation", "two bases"),
    ],
)
def test_selects_layers_that_the_kernel_computes(
    model: Decoder, selected: list[list[DecodeLayer]], change: str
) -> None:
    attention, mlp = model.blocks[1].attention, model.blocks[1].mlp
    if change == "bias":
        attention.qkv_proj.bias = torch.nn.Parameter(torch.zeros(128))
    elif change == "window":
        attention.sliding_window = 8
    elif change == "no head norm":
        attention.q_norm = None
    elif change == "gelu":
        mlp.activation = "gelu_pytorch_tanh"
    elif change == "post norm":
        mlp.post_norm = mlp.norm
    elif change == "FP8":
        mlp.down_proj.quantize(FP8_PER_CHANNEL)
    elif change == "no norm before":
        mlp.norm = None
    elif change == "wide norms":
        attention.wide_norms = WideHeadNorms(model.config.norm, 64, 32)
    elif change == "no rotation":
        model.config = replace(model.config, nope_layers=frozenset({1}))
    elif change == "two bases":
        model.config = replace(model.config, rope_local_theta=1e4)
    elif change == "sharded":
        attention.o_proj._group = object()
    model.prepare_decode(caches(model))
    assert (model._decode_layers is not None) == (change == "none")


def test_needs_a_gpu(model: Decoder) -> None:
    model.prepare_decode(caches(model))
    assert model._decode_layers is None


def random_layers(count: int, pages: int, device: str = "cuda") -> list[DecodeLayer]:
    torch.manual_seed(2)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02

    def norm(size: int) -> torch.Tensor:
        return 1 + weight(size) * 10

    hidden, heads, kv_heads, intermediate = SIZES
    cache_shape = (pages, PAGE_SIZE, kv_heads, 128)
    return [
        DecodeLayer(
            Norm(norm(hidden), 1e-6),
            weight((heads + 2 * kv_heads) * 128, hidden),
            HeadNorms(norm(128), norm(128), 1e-6),
            weight(hidden, heads * 128),
            Norm(norm(hidden), 1e-6),
            weight(2 * intermediate, hidden),
            weight(hidden, intermediate),
            weight(*cache_shape) * 50,
            weight(*cache_shape) * 50,
        )
        for _ in range(count)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "contexts",
    [
        *([1], [16], [17], [64], [128], [700], [2048], [8192]),
        *([1, 700], [130, 16], [700, 1, 2048], [700, 8192, 64, 17], [129] * 4, [33_000]),
        *([300] * 9, [1000 - 61 * index for index in range(16)], [1, 2, 8, 9, 64, 65] * 2),
    ],
    ids=str,
)
def test_computes_the_reference(contexts: list[int]) -> None:
    pages, device, count = 600, torch.device("cuda"), len(contexts)
    layers = random_layers(3, pages)
    if not supports(layers):
        pytest.skip("this GPU does not support the kernel")
    rotary = rotary_table(128, 65536, 1e6, device)
    table = torch.zeros(count + 1, 1024, dtype=torch.int64, device=device)
    free = 1 + torch.randperm(pages - 1, device=device)
    for row, context in enumerate(contexts):
        used = -(-context // PAGE_SIZE)
        table[count - row, :used], free = free[:used], free[used:]
    rows, positions = torch.arange(count, 0, -1, device=device), torch.tensor(contexts, device=device) - 1
    hidden = torch.randn(count, SIZES.hidden, device=device, dtype=torch.bfloat16)
    before = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    kernel = DecodeLayers(layers, rotary, 128**-0.5)

    outputs = [kernel.run(hidden, positions, table, rows) for _ in range(10)]
    after = [(layer.keys.clone(), layer.values.clone()) for layer in layers]
    for layer, (keys, values) in zip(layers, before, strict=True):
        layer.keys.copy_(keys)
        layer.values.copy_(values)
    wide = [DecodeLayer(*map(as_float, layer)) for layer in layers]
    expected = decode_layers_reference(wide, hidden.float(), rotary, 128**-0.5, positions, table, rows)

    assert all(torch.equal(output, outputs[0]) for output in outputs)
    assert ((outputs[0].float() - expected).norm(dim=1) / expected.norm(dim=1)).max() < 0.01
    for (keys, values), layer in zip(after, wide, strict=True):
        assert (keys.float() - layer.keys).norm() / layer.keys.norm() < 1e-3
        assert (values.float() - layer.values).norm() / layer.values.norm() < 1e-3


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 9, MAX_TOKENS])
def test_padding_accesses_no_cache(count: int) -> None:
    layers = random_layers(2, 4)
    if not supports(layers):
        pytest.skip("this GPU does not support the kernel")
    device = torch.device("cuda")
    before = [layer.keys.clone() for layer in layers]
    table = torch.full((1, 4), 10**9, device=device)  # such pages would be an illegal access
    kernel = DecodeLayers(layers, rotary_table(128, 256, 1e6, device), 128**-0.5)
    hidden = torch.randn(count, SIZES.hidden, device=device, dtype=torch.bfloat16)
    positions, rows = torch.full((count,), -1, device=device), torch.zeros(count, dtype=torch.int64, device=device)
    assert kernel.run(hidden, positions, table, rows).isfinite().all()
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(layers, before, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 5, 9, MAX_TOKENS])
def test_padding_changes_no_other_token(count: int) -> None:
    layers = random_layers(2, 16)
    if not supports(layers):
        pytest.skip("this GPU does not support the kernel")
    device = torch.device("cuda")
    table = torch.arange(16, device=device)[:, None]
    kernel = DecodeLayers(layers, rotary_table(128, 256, 1e6, device), 128**-0.5)
    hidden = torch.randn(count, SIZES.hidden, device=device, dtype=torch.bfloat16)
    positions, rows = torch.arange(40, 40 + count, device=device), torch.arange(count, device=device).flip(0)
    everything = kernel.run(hidden, positions, table, rows)
    kept = count // 2
    positions[kept:], hidden[kept:] = -1, float("nan")
    assert torch.equal(kernel.run(hidden, positions, table, rows)[:kept], everything[:kept])


@pytest.mark.gpu
def test_repeats_have_the_same_bits() -> None:
    """Also when steps of other sizes run between them, in graphs."""
    counts = (5, MAX_TOKENS, 1, 10, 8)
    layers = random_layers(5, 12 * sum(counts))
    if not supports(layers):
        pytest.skip("this GPU does not support the kernel")
    device = torch.device("cuda")
    kernel = DecodeLayers(layers, rotary_table(128, 1024, 1e6, device), 128**-0.5)
    table = torch.randperm(12 * sum(counts), device=device).view(-1, 12)
    rows = torch.arange(sum(counts), device=device).split(counts)
    inputs = [
        (
            torch.randn(count, SIZES.hidden, device=device, dtype=torch.bfloat16),
            torch.randint(0, 12 * PAGE_SIZE, (count,), device=device),
        )
        for count in counts
    ]

    def run_all() -> list[torch.Tensor]:
        return [kernel.run(*each, table, own) for each, own in zip(inputs, rows, strict=True)]

    expected, graph = run_all(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = run_all()
    for _ in range(2000):
        graph.replay()
        assert all(map(torch.equal, outputs, expected))
