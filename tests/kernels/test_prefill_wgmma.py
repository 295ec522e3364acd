"""Attention of prompts in CUDA C++: selection, compilation, and on a GPU its results."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from test_attention_kernels import POISON, make_sequences

from meltcore.kernels.attention import prefill_wgmma as wgmma
from meltcore.kernels.attention.kv_cache import attention_reference, rotated_queries
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms, make_query_tiles
from meltcore.kernels.attention.prefill import prefill_attention
from meltcore.kernels.nvrtc import compile_source
from meltcore.kernels.rotary import rotary_table

CHUNKS = {  # as (start, tokens)
    "one token": [(0, 1)],
    "a tile": [(0, 64)],
    "a block": [(0, 128)],
    "a tile and two tokens": [(0, 66), (127, 3)],
    "after a prefix": [(70, 33), (128, 10), (4000, 100)],
    "long": [(0, 4100)],
}


@pytest.mark.slow
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
def test_compiles(normed: bool) -> None:
    assert compile_source(
        wgmma.KERNEL.source(), wgmma.KERNEL.name, dict(wgmma.kernel_macros(16, 8, 64, normed=normed)), "90a"
    )


def layer(**changes: Any) -> tuple[Any, Any]:
    """A projection and the parameters of a layer that the kernel computes, but for `changes`, as on a GPU."""
    of = {"page": 64, "dim": 128, "kv_heads": 8, "window": None, "dtype": torch.bfloat16, "weight": torch.bfloat16}
    of |= changes
    cache = torch.empty(2, of["page"], of["kv_heads"], of["dim"], dtype=of["dtype"])
    weight = torch.empty(of["dim"], dtype=of["weight"])
    params = AttentionParams(HeadNorms(weight, weight, 1e-6), torch.empty(9, 128), cache, cache, 0.1, of["window"])
    rows = torch.empty(4, 8192, dtype=torch.bfloat16)
    on_gpu = SimpleNamespace(
        is_cuda=True, device=None, dtype=rows.dtype, data_ptr=rows.data_ptr, stride=rows.stride, element_size=lambda: 2
    )
    return on_gpu, params


@pytest.mark.parametrize(
    ("changes", "capability", "expected"),
    [
        ({}, 90, True),
        ({"page": 128}, 90, True),
        ({}, 80, False),
        ({}, 100, False),
        ({"page": 32}, 90, False),
        ({"dim": 64}, 90, False),
        ({"kv_heads": 16}, 90, False),
        ({"window": 5}, 90, False),
        ({"dtype": torch.float8_e4m3fn}, 90, False),
        ({"weight": torch.float32}, 90, False),
    ],
    ids=str,
)
def test_supports(changes: dict[str, Any], capability: int, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "capability", lambda _: capability)
    assert wgmma.supports(*layer(**changes), heads=16) == expected


def test_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "capability", lambda _: 90)
    assert not wgmma.supports(torch.empty(4, 8192, dtype=torch.bfloat16), layer()[1], heads=16)


def test_is_chosen_where_every_sm_has_an_item(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wgmma, "sm_count", lambda _: 132)
    device = torch.device("cpu")
    assert wgmma.is_faster(16, 16, device)
    assert not wgmma.is_faster(9, 16, device)


def assert_equals_reference(
    group: int, kv_heads: int, page_size: int, chunks: list[tuple[int, int]], *, normed: bool
) -> None:
    device, dtype, heads = torch.device("cuda"), torch.bfloat16, group * kv_heads
    made = make_sequences([start + count for start, count in chunks], kv_heads, 128, dtype, device)
    caches = [made.key_cache, made.value_cache]
    table = made.page_table
    if page_size != 64:  # two neighboring pages are one
        caches = [
            torch.full((len(table) * table.shape[1], page_size, kv_heads, 128), np.nan, dtype=dtype) for _ in "kv"
        ]
        caches = [cache.to(device) for cache in caches]
        for old, new in zip((made.key_cache, made.value_cache), caches, strict=True):
            new.view(len(table), table.shape[1], 2, 64, kv_heads, 128)[:, : table.shape[1] // 2] = old[
                table[:, : table.shape[1] // 2 * 2]
            ].view(len(table), -1, 2, 64, kv_heads, 128)
        table = torch.arange(table.numel(), device=device).view(table.shape)
    ends = np.cumsum([count + 1 for _, count in chunks]).tolist()
    projected = torch.randn(ends[-1] + 1, heads + 2 * kv_heads + 1, 128, device=device).to(dtype)
    qkv = projected[:, :-1].flatten(1)
    weight = torch.randn(128, device=device).to(dtype)
    rotary = rotary_table(128, max(start + count for start, count in chunks), 10_000.0, device)
    params = AttentionParams(HeadNorms(weight, weight, 1e-6) if normed else None, rotary, *caches, 128**-0.5)
    firsts = [end - count for end, (_, count) in zip(ends, chunks, strict=True)]
    rows = made.rows.tolist()
    tiles = make_query_tiles((row, f, n, s) for row, f, (s, n) in zip(rows, firsts, chunks, strict=True))
    tiles = torch.from_numpy(np.concatenate([tiles, np.zeros((3, 4), np.int32)])).to(device)  # padding
    outputs = [torch.full((len(qkv), heads, 128), POISON, dtype=dtype, device=device) for _ in range(2)]
    poison = outputs[0][0].clone()
    if not wgmma.supports(qkv, params, heads):
        pytest.skip("this GPU does not support the kernel")

    for out in outputs:
        wgmma.prefill_wgmma(qkv, params, table, tiles, out)

    assert torch.equal(*outputs)
    covered = torch.zeros(len(qkv), dtype=torch.bool, device=device)
    for row, first, (start, count) in zip(rows, firsts, chunks, strict=True):
        span, positions = slice(first, first + count), torch.arange(start, start + count, device=device)
        expected = attention_reference(rotated_queries(qkv[span], params, positions), params, table[row], start).float()
        errors = (outputs[0][span].float() - expected).norm(dim=-1) / expected.norm(dim=-1)
        assert errors.max() < 0.03
        covered[span] = True
    assert (outputs[0][~covered] == poison).all()


@pytest.mark.gpu
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize("group", [2, 4, 8])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_computes_the_reference(chunks: list[tuple[int, int]], group: int, normed: bool) -> None:
    torch.manual_seed(1)
    assert_equals_reference(group, 2, 64, chunks, normed=normed)


@pytest.mark.gpu
def test_pages_of_two_copies() -> None:
    torch.manual_seed(2)
    assert_equals_reference(2, 2, 128, [(0, 300), (190, 129)], normed=True)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_computes_the_reference_of_random_chunks(seed: int) -> None:
    torch.manual_seed(seed)
    of = random.Random(seed)
    longest = [of.choice([70, 700, 4100]) for _ in range(of.randint(1, 6))]
    chunks = [(of.choice([0, of.randint(1, 2000)]), of.randint(1, tokens)) for tokens in longest]
    assert_equals_reference(of.choice([2, 4, 8]), of.choice([1, 2, 4]), 64, chunks, normed=bool(seed % 2))


@pytest.mark.gpu
def test_prefill_chooses_it_for_a_long_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    device, launched = torch.device("cuda"), []
    made = make_sequences([2048], 8, 128, torch.bfloat16, device)
    qkv = torch.randn(2048, 32 * 128, device=device).to(torch.bfloat16)
    params = AttentionParams(None, rotary_table(128, 2048, 1e4, device), made.key_cache, made.value_cache, 0.1)
    if not wgmma.supports(qkv, params, 16):
        pytest.skip("this GPU does not support the kernel")
    monkeypatch.setattr(wgmma.KERNEL, "launch", lambda *_, **__: launched.append(1))
    tiles = torch.from_numpy(make_query_tiles([(int(made.rows[0]), 0, 2048, 0)])).to(device)
    prefill_attention(qkv, params, made.page_table, tiles)
    assert launched
