"""Kernels of text encoders: attention and means of packed rows, embeddings with their norm, and GELU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from emulated_graphs import EmulatedCapturer
from encoder_tools import write_encoder
from kernel_tools import in_reference, in_triton
from torch.nn import functional

from meltcore.engine.embedding import encoder_graphs
from meltcore.engine.embedding.encoder_graphs import TextEncoderGraphs
from meltcore.engine.embedding.engine import load_pooling_model
from meltcore.kernels import layer_norm
from meltcore.kernels.activation import gelu
from meltcore.kernels.attention import packed
from meltcore.kernels.attention.packed import make_row_tiles, max_tiles, mean_of_rows, packed_attention
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.layer_norm import add_layer_norm, embed_layer_norm
from meltcore.models.checkpoints.checkpoint import open_checkpoint
from meltcore.models.tasks.encoder import TextEncoder


@pytest.mark.parametrize(("head_dim", "lengths"), [(32, [5, 1, 40, 16, 33]), (24, [17, 64])])
def test_each_row_attends_to_itself(
    head_dim: int, lengths: list[int], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "BLOCK_QUERIES", 16)
    monkeypatch.setattr(packed, "_BLOCK_KEYS", 16)
    torch.manual_seed(head_dim)
    padding, heads = 9, 2
    tiles = torch.from_numpy(make_row_tiles(np.array(lengths, np.int32)))
    longer = torch.cat([tiles, torch.full((3, 3), 7, dtype=torch.int32)])
    qkv = torch.randn(sum(lengths) + padding, 3 * heads * head_dim)
    found = in_triton(packed_attention)(qkv.to(device), longer.to(device), heads).cpu()
    expected, start = in_reference(packed_attention)(qkv, tiles, heads), 0
    for length in lengths:
        end = start + length
        split = qkv[start:end].view(length, 3, heads, head_dim).double().permute(1, 2, 0, 3)
        weights = (split[0] @ split[1].mT / head_dim**0.5).softmax(-1)
        exact = (weights @ split[2]).transpose(0, 1).flatten(1).float()
        tolerance = 1e-5 if device.type == "cpu" else 1e-3
        torch.testing.assert_close(found[start:end], exact, atol=tolerance, rtol=0)
        torch.testing.assert_close(expected[start:end], exact, atol=1e-5, rtol=0)
        start = end


def test_tiles_cover_each_query_once_and_never_exceed_their_maximum() -> None:
    lengths = np.array([1, 300, 128, 129, 7], np.int32)
    (count, *_), *tiles = make_row_tiles(lengths).tolist()
    assert count == len(tiles) <= max_tiles(int(lengths.sum()), len(lengths))
    queries = [q for first, _, end in tiles for q in range(first, min(end, first + packed.BLOCK_QUERIES))]
    assert queries == list(range(lengths.sum()))
    ends = lengths.cumsum()
    assert {(start, end) for _, start, end in tiles} == set(zip(ends - lengths, ends, strict=True))


@pytest.mark.parametrize("size", [48, 130])
def test_means_of_rows(size: int, device: torch.device) -> None:
    hidden, lengths = torch.randn(80, size), torch.tensor([1, 70, 0, 9])
    rows = torch.stack([lengths.cumsum(0) - lengths, lengths])
    expected = torch.stack([part.mean(0) for part in hidden.split(lengths.tolist()) if len(part)])
    for place, function in (("cpu", mean_of_rows), (device, in_triton(mean_of_rows))):
        found = function(hidden.to(place), rows.to(place)).cpu()
        torch.testing.assert_close(found[[0, 1, 3]], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_many", [False, True])
def test_the_norm_of_embeddings(is_many: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_many:
        monkeypatch.setattr(layer_norm, "_MANY_TOKENS", 1)
    size = 48
    tables = [torch.randn(rows, size) for rows in (30, 20, 2)]
    indices = torch.stack([torch.randint(len(table), (7,)) for table in tables])
    weight, bias = torch.randn(size), torch.randn(size)
    total = sum(table[each] for table, each in zip(tables, indices, strict=True))
    expected = functional.layer_norm(total, (size,), weight, bias, 1e-5)
    for place, function in (("cpu", embed_layer_norm), (device, in_triton(embed_layer_norm))):
        given = [table.to(place) for table in tables], indices.to(place), weight.to(place), bias.to(place)
        torch.testing.assert_close(function(*given, 1e-5).cpu(), expected, atol=1e-5, rtol=0)
        added = function(*given, 1e-5)
        both = (in_triton(add_layer_norm) if place == device else add_layer_norm)(
            added, added.half(), *given[2:], 1e-5, keeps_sum=False
        )
        doubled = functional.layer_norm(expected + expected.half(), (size,), weight, bias, 1e-5)
        torch.testing.assert_close(both.cpu(), doubled, atol=1e-3, rtol=0)


def test_gelu_is_exact(device: torch.device) -> None:
    values = torch.linspace(-6, 6, 4099)
    expected = functional.gelu(values.double()).float()
    assert torch.equal(gelu(values), functional.gelu(values))
    torch.testing.assert_close(in_triton(gelu)(values.to(device)).cpu(), expected, atol=2e-6, rtol=0)
    # In float16 it is the nearest value, or beside it where the result is smaller than a millionth.
    found, halves = in_triton(gelu)(values.half().to(device)).cpu(), values.half().double()
    torch.testing.assert_close(found, functional.gelu(halves).half(), atol=2e-6, rtol=2**-10)


@pytest.mark.slow
def test_padding_and_what_an_earlier_batch_left_change_no_result(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_graphs, "GraphCapturer", EmulatedCapturer)
    monkeypatch.setattr(layer_norm, "_MANY_TOKENS", 1)
    monkeypatch.setattr(layer_norm, "_TOKENS_PER_PROGRAM", 32)
    write_encoder(tmp_path, "BertModel")
    checkpoint, exact = open_checkpoint(str(tmp_path), files="all"), []
    reference = load_pooling_model(checkpoint, torch.float32, torch.device("cpu"))
    rows = [(torch.randint(4, 40, (length,)), start) for length, start in ((30, 7), (5, 5), (1, 1), (9, 2))]
    with torch.inference_mode():
        for ids, start in rows:
            exact.append(reference(ids, torch.tensor([len(ids)]), torch.tensor([start]), [len(ids)])[0])
    model = load_pooling_model(checkpoint, torch.float16, device)
    assert isinstance(model, TextEncoder)
    force_implementation("triton")
    try:
        graphs = TextEncoderGraphs(model, 64)
        graphs.capture(lambda _stage, _part: None)
        for batch in (slice(4), slice(1, 3)):
            lengths, starts = np.array([(len(ids), start) for ids, start in rows[batch]], np.int32).T
            # Padding has any values, and the interpreter warns of those that are no numbers.
            with torch.inference_mode(), np.errstate(all="ignore"):
                found = graphs.launch(torch.cat([ids for ids, _ in rows[batch]]).numpy(), lengths, starts).cpu()
            torch.testing.assert_close(found, torch.stack(exact[batch]), atol=0.01, rtol=0)
    finally:
        force_implementation(None)
