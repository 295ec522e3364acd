"""Kernels of a beam search against their references: attention of beams, their norms, and their best tokens."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.attention import beam
from meltcore.kernels.layer_norm import add_layer_norm
from meltcore.kernels.sampling.beam_top_k import log_softmax_top_k, log_softmax_top_k_reference

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def randn(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


@pytest.mark.parametrize(
    ("beams", "head_dim", "length", "dtype"),
    [(5, 8, 20, torch.float32), (1, 16, 7, torch.float32), (8, 12, 33, torch.float32), (5, 64, 20, torch.float16)],
)
def test_self_attention_reads_what_the_writers_wrote(
    beams: int, head_dim: int, length: int, dtype: torch.dtype, device: torch.device
) -> None:
    torch.manual_seed(beams)
    slots, heads = torch.tensor([4, 0, 2, 5]), 2
    positions = torch.tensor([0, length - 1, length // 2, 3])
    qkv, cache = (
        randn(4, beams, 3, heads, head_dim, dtype=dtype),
        randn(2, 6, heads, length, beams, head_dim, dtype=dtype),
    )
    qkv[:, :, :2] *= 3  # peaks: a wrong entry shows
    writers = torch.randint(0, beams, (6, beams, length), dtype=torch.int8)
    expected_cache, found_cache = cache.clone(), cache.to(device)
    expected = beam.beam_self_attention_reference(qkv, expected_cache, writers, slots, positions, length)
    found = in_triton(beam.beam_self_attention)(
        qkv.to(device), found_cache, writers.to(device), slots.to(device), positions.to(device), length
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=TOLERANCE[dtype])
    assert torch.equal(found_cache.cpu(), expected_cache)


def test_reference_of_self_attention_is_attention_to_the_gathered_prefixes() -> None:
    """By loops over rows and beams, from the definition of the table of writers."""
    torch.manual_seed(3)
    beams, heads, head_dim, slots, positions = 3, 2, 4, torch.tensor([1, 0]), torch.tensor([5, 2])
    qkv, cache = torch.randn(2, beams, 3, heads, head_dim), torch.randn(2, 2, heads, 7, beams, head_dim)
    writers = torch.randint(0, beams, (2, beams, 7), dtype=torch.int8)
    found = beam.beam_self_attention_reference(qkv, cache, writers, slots, positions, 6).unflatten(-1, (heads, -1))
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        for each in range(beams):
            wrote = [*writers[slot, each, :position].tolist(), each]
            for head in range(heads):
                keys, values = (
                    torch.stack([cache[kind, slot, head, place, writer] for place, writer in enumerate(wrote)])
                    for kind in range(2)
                )
                assert torch.equal(keys[-1], qkv[row, each, 1, head])
                weights = (keys @ qkv[row, each, 0, head] / head_dim**0.5).softmax(0)
                torch.testing.assert_close(found[row, each, head], weights @ values)


@pytest.mark.parametrize(("length", "dtype"), [(70, torch.float32), (9, torch.float16)])
def test_cross_attention_reads_the_source_of_the_slot(length: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(length)
    query, cache = 3 * randn(3, 5, 2, 16, dtype=dtype), randn(2, 4, 2, length, 16, dtype=dtype)
    slots, lengths = torch.tensor([3, 1, 0]), torch.tensor([length, 1, length // 2])
    expected = beam.beam_cross_attention_reference(query, cache, slots, lengths, length)
    found = in_triton(beam.beam_cross_attention)(
        query.to(device), cache.to(device), slots.to(device), lengths.to(device), length
    )
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=TOLERANCE[dtype])
    alone = torch.nn.functional.scaled_dot_product_attention(
        query[2].transpose(0, 1), cache[0, 0, :, : length // 2], cache[1, 0, :, : length // 2]
    )
    torch.testing.assert_close(expected[2].unflatten(-1, (2, -1)), alone.transpose(0, 1), rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("vocab", "k", "dtype"),
    [(47, 10, torch.float32), (4097, 10, torch.float32), (9000, 16, torch.float16), (130, 1, torch.float32)],
)
def test_best_tokens_and_their_log_probabilities(vocab: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(vocab)
    logits = (4 * torch.randn(6, vocab)).to(dtype)
    is_forbidden = torch.tensor([True, False] * 3)
    logits[:3, 2] = 40.0  # the token is the best one: forbidden or not shows, and so does its probability
    logits[4] -= 300.0
    expected, expected_tokens = log_softmax_top_k_reference(logits, k, 2, is_forbidden)
    found, tokens = in_triton(log_softmax_top_k)(logits.to(device), k, 2, is_forbidden.to(device))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-4)
    if dtype == torch.float32:
        assert torch.equal(tokens.cpu(), expected_tokens)
    assert (tokens.cpu() == 2).any(1).tolist()[:3] == [False, True, False]
    assert all(len(set(row)) == k for row in tokens.tolist())


def test_of_equal_logits_the_lowest_tokens_are_taken(device: torch.device) -> None:
    logits = torch.zeros(1, 5000)
    logits[0, [4999, 3000, 900]] = 1.0
    _, tokens = in_triton(log_softmax_top_k)(logits.to(device), 6, 1, torch.tensor([True]).to(device))
    assert tokens.tolist() == [[900, 3000, 4999, 0, 2, 3]]


@pytest.mark.parametrize(("size", "dtype"), [(48, torch.float32), (1024, torch.float32), (520, torch.float16)])
def test_layer_norm_of_a_sum(size: int, dtype: torch.dtype, device: torch.device) -> None:
    torch.manual_seed(size)
    residual, added = 3 + randn(3, 5, size, dtype=dtype), randn(3, 5, size, dtype=dtype)
    weight, bias = randn(size, dtype=dtype), randn(size, dtype=dtype)
    total = (residual + added).float()
    scale = (total.var(-1, correction=0, keepdim=True) + 1e-5).rsqrt()
    expected = (total - total.mean(-1, keepdim=True)) * scale * weight.float() + bias.float()
    for place, function in (("cpu", add_layer_norm), (device, in_triton(add_layer_norm))):
        changed = residual.clone().to(place)
        found = function(changed, added.to(place), weight.to(place), bias.to(place), 1e-5)
        assert torch.equal(changed.cpu(), residual + added)
        torch.testing.assert_close(found.cpu().float(), expected, rtol=0, atol=TOLERANCE[dtype])
