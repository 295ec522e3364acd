"""Norm and rotation of keys and the write to the cache in one kernel, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from kernel_tools import in_triton

from meltcore.kernels.attention.kv_cache import store_kv, store_kv_reference
from meltcore.kernels.attention.metadata import AttentionParams, HeadNorms
from meltcore.kernels.rotary import rotary_table

EPS = 1e-6
PAGE_SIZE, PAGES, POSITIONS = 4, 6, 300


class Shape(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int


SHAPES = [
    Shape(tokens=5, heads=16, kv_heads=8, head_dim=128),  # Qwen3-0.6B
    Shape(tokens=7, heads=4, kv_heads=2, head_dim=64),  # the bundled model
    Shape(tokens=1, heads=40, kv_heads=8, head_dim=128),
    Shape(tokens=3, heads=7, kv_heads=1, head_dim=80),  # nothing a power of two
    Shape(tokens=2, heads=6, kv_heads=3, head_dim=256),
    Shape(tokens=0, heads=4, kv_heads=2, head_dim=64),
]


def arguments(shape: Shape, dtype: torch.dtype, seed: int, normed: bool = True) -> list[Any]:
    torch.manual_seed(seed)
    tokens, heads, kv_heads, head_dim = shape
    width = (heads + 2 * kv_heads) * head_dim
    cache = (PAGES, PAGE_SIZE, kv_heads, head_dim)
    return [
        (torch.randn(tokens, width) * torch.rand(tokens, 1).mul(8)).to(dtype),
        HeadNorms(torch.randn(head_dim).to(dtype), torch.randn(head_dim).to(dtype), EPS) if normed else None,
        rotary_table(head_dim, POSITIONS, 10_000.0, torch.device("cpu")),
        torch.randint(POSITIONS, (tokens,)),
        torch.randperm(PAGES * PAGE_SIZE)[:tokens],
        torch.randn(cache).to(dtype),
        torch.randn(cache).to(dtype),
    ]


def store(function: Callable[..., None], given: Sequence[Any]) -> None:
    qkv, norms, rotary, positions, slots, *caches = given
    function(qkv, AttentionParams(norms, rotary, *caches, 1.0), positions, slots)


def on(device: torch.device, values: Sequence[Any]) -> list[Any]:
    """Copies of the tensors, those of the norms too."""

    def copy(value: Any) -> Any:
        if isinstance(value, HeadNorms):
            return HeadNorms(*on(device, value))
        return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value

    return [copy(value) for value in values]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("normed", [True, False], ids=["normed", "plain"])
@pytest.mark.parametrize(("seed", "shape"), list(enumerate(SHAPES)), ids=str)
def test_store_kv_agrees_with_its_reference(
    seed: int, shape: Shape, normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    given = arguments(shape, dtype, seed, normed)
    ours, theirs = on(device, given), on(torch.device("cpu"), given)
    store(in_triton(store_kv), ours)
    store(store_kv_reference, theirs)
    # A rotation may cancel: what is left is judged by the size of what was rotated, as the reference itself rounds.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(ours[-2].cpu(), theirs[-2], rtol=tolerance, atol=tolerance)
    assert torch.equal(ours[-1].cpu(), theirs[-1]), "values are stored as they are"
    untouched = torch.ones(PAGES * PAGE_SIZE, dtype=torch.bool)
    untouched[given[4]] = False
    for changed, before in zip(ours[-2:], given[-2:], strict=True):
        assert torch.equal(changed.cpu().flatten(0, 1)[untouched], before.flatten(0, 1)[untouched])


@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
def test_store_kv_reads_strided_rows(seed: int, device: torch.device) -> None:
    given = arguments(SHAPES[1], torch.float32, seed)
    theirs = on(torch.device("cpu"), given)
    store(store_kv_reference, theirs)
    ours = on(device, given)
    width = ours[0].shape[1]
    ours[0] = torch.cat((ours[0], torch.full_like(ours[0], 7.0)), dim=1)[:, :width]
    store(in_triton(store_kv), ours)
    for stored, expected in zip(ours[-2:], theirs[-2:], strict=True):
        torch.testing.assert_close(stored.cpu(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(3), ids="seed{}".format)
def test_store_kv_takes_norms_in_float32(seed: int, device: torch.device) -> None:
    """Rounded once, after the weight: nearly all keys are then exactly the reference's."""
    given = arguments(SHAPES[1], torch.bfloat16, seed)
    given[1] = HeadNorms(given[1].query.float() + 1e-3, given[1].key.float() + 1e-3, EPS)
    ours, theirs = on(device, given), on(torch.device("cpu"), given)
    store(in_triton(store_kv), ours)
    store(store_kv_reference, theirs)
    torch.testing.assert_close(ours[-2].cpu(), theirs[-2], rtol=3e-2, atol=3e-2)
    assert (ours[-2].cpu() == theirs[-2]).float().mean() > 0.98


def test_store_kv_refuses_a_cache_with_gaps(device: torch.device) -> None:
    given = on(device, arguments(SHAPES[1], torch.float32, 0))
    given[-2] = given[-2][:, :-1]
    with pytest.raises(RuntimeError, match="view"):
        store(in_triton(store_kv), given)
