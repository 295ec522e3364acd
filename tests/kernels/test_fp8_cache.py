"""A cache in FP8: what is stored is the nearest that e4m3 holds, and attention is to what is stored."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import (  # noqa: F401, the fixture applies here too
    dense_attention,
    interpreter_of_loops_and_dots,
    turned,
)
from test_fp8_kernels import conversions_of_fp8  # noqa: F401, this one too

from meltcore.kernels import decode_attention as decode_file
from meltcore.kernels import prefill_attention as prefill_file
from meltcore.kernels import qkv as qkv_file
from meltcore.kernels.attention import query_tiles
from meltcore.kernels.fp8 import FP8, LARGEST
from meltcore.kernels.qkv import HeadNorms
from meltcore.kernels.rotary import rotary_table

HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, PROMPT = 4, 2, 64, 64, 100
SCALE = HEAD_DIM**-0.5
PAGES = [3, 1]  # of the one sequence; page 0 is for padding, page 2 nobody's

BODIES = {
    "torch": (qkv_file._store_kv_torch, prefill_file._prefill_torch, decode_file._decode_torch),
    "triton": (qkv_file._store_kv_triton, prefill_file._prefill_triton, decode_file._decode_triton),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("body", BODIES)
def test_attention_is_to_what_an_fp8_cache_holds(body: str, dtype: torch.dtype, device: torch.device) -> None:
    """A prompt and one new token, of which one value lies beyond the range of e4m3 and is held as its largest."""
    torch.manual_seed(0)
    store, prefill, decode = BODIES[body]
    qkv = torch.randn(PROMPT + 1, (HEADS + 2 * KV_HEADS) * HEAD_DIM).to(dtype)
    qkv[7, -1], qkv[PROMPT, -2] = 500.0, -1e4
    norms = HeadNorms((torch.rand(HEAD_DIM) + 0.5).to(dtype), (torch.rand(HEAD_DIM) + 0.5).to(dtype), 1e-6)
    rotary, positions = rotary_table(HEAD_DIM, 128, 10_000.0, torch.device("cpu")), torch.arange(PROMPT + 1)
    slots = torch.tensor(PAGES)[positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    heads = qkv.unflatten(-1, (-1, HEAD_DIM))
    queries = turned(heads[:, :HEADS], norms.query, rotary, positions)
    keys = turned(heads[:, HEADS : HEADS + KV_HEADS], norms.key, rotary, positions)
    held_keys = keys.float().clamp(-LARGEST, LARGEST).to(FP8).float()
    held_values = heads[:, HEADS + KV_HEADS :].float().clamp(-LARGEST, LARGEST).to(FP8).float()

    caches = [torch.zeros(4, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=FP8, device=device) for _ in range(2)]
    table = torch.tensor([[0, 0, 0], [*PAGES, 0]], device=device)
    given, there = qkv.to(device), HeadNorms(norms.query.to(device), norms.key.to(device), norms.eps)
    turns, at = rotary.to(device), positions.to(device)
    store(given[:PROMPT], there, turns, at[:PROMPT], slots[:PROMPT].to(device), *caches)
    tiles = torch.from_numpy(query_tiles([(1, 0, PROMPT, 0)])).int().to(device)
    out = torch.zeros(PROMPT + 1, HEADS, HEAD_DIM, dtype=dtype, device=device)
    prefill(given[:PROMPT], there, turns, *caches, table, tiles, SCALE, out[:PROMPT])
    row = torch.ones(1, dtype=torch.int64, device=device)
    decode(given[PROMPT:], there, turns, at[PROMPT:], *caches, table, row, SCALE, out[PROMPT:], 2)

    for cache, held in zip(caches, (held_keys, held_values), strict=True):
        found = cache.cpu().flatten(0, 1).float()[slots]
        # A key that was rounded to bfloat16 twice on its way may lie next to another boundary of e4m3.
        assert (found != held).double().mean() < 0.05
        torch.testing.assert_close(found, held, rtol=0.13, atol=0.02)
    assert found[7, -1, -1] == LARGEST
    assert found[PROMPT, -1, -2] == -LARGEST
    expected = dense_attention(queries, held_keys, held_values, 0, SCALE)
    assert (out.cpu().double() - expected).norm() <= 1e-2 * expected.norm()
