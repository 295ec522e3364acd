"""The persistent GEMM with TMA against float64, and where it is used."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_tools import in_triton
from test_linear import TYPES, assert_near, exact, exact_gated, random_matmul

from meltcore.kernels.gemm import tma as tma_file
from meltcore.kernels.gemm.linear import linear
from meltcore.kernels.gemm.split_k import GemmConfig
from meltcore.kernels.gemm.tma import is_faster, select_config, supports, tma_gemm

# Tokens, outputs and columns that fill no tile.
SHAPES = pytest.mark.parametrize(("tokens", "n", "k"), [(70, 48, 72), (200, 144, 192), (5, 304, 64)])
TILES = [GemmConfig(64, 128, 64, 3, 4), GemmConfig(128, 256, 64, 3, 8)]


@pytest.mark.slow
@TYPES
@SHAPES
@pytest.mark.parametrize("config", TILES, ids=lambda config: f"{config.block_m}x{config.block_n}")
def test_tiles_match_float64(
    config: GemmConfig, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    """The whole result, with an activation, and added to a residual; several tiles per program in the interpreter."""
    hidden, weight = random_matmul(0, tokens, n, k, dtype)
    multiply = partial(tma_gemm, hidden.to(device), dtype=dtype, config=config)
    assert_near(multiply(weight=weight.to(device)), exact(hidden, weight), dtype, steps=4)
    before = torch.randn(tokens, n).to(dtype)
    residual = before.to(device, copy=True)
    assert multiply(weight=weight.to(device), residual=residual) is residual
    assert_near(residual, before.double() + exact(hidden, weight), dtype, steps=4)
    gated = multiply(weight=weight.to(device), gated=True)
    assert gated.shape == (tokens, n // 2)
    assert_near(gated, exact_gated(hidden, weight), dtype, steps=10)


def test_configurations_follow_the_number_of_outputs() -> None:
    chosen = partial(select_config, gated=True, is_fp8=False)
    tiles = [chosen(tokens, 6144)[:2] for tokens in (512, 1024, 2047, 2048)]
    assert tiles == [(64, 128), (128, 128), (128, 128), (128, 256)]
    tiles = [select_config(tokens, 1024, gated=False, is_fp8=True)[:2] for tokens in (1024, 1025, 4096)]
    assert tiles == [(64, 128), (128, 128), (128, 256)]
    assert [is_faster(*each) for each in ((1023, 6144), (1024, 1024), (1024, 2048))] == [False, False, True]


def test_hopper_gpus_multiply_gate_and_up_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.zeros(1024, 64, dtype=torch.bfloat16), torch.zeros(2048, 64, dtype=torch.bfloat16)
    called: list[bool] = []

    def record(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype, *, gated: bool) -> torch.Tensor:
        called.append(gated)
        return hidden

    monkeypatch.setattr("meltcore.kernels.gemm.linear.tma.tma_gemm", record)
    monkeypatch.setattr("meltcore.kernels.gemm.linear.swiglu", lambda output: output)
    for capability in (80, 100, 90):
        monkeypatch.setattr(tma_file, "capability", lambda _, value=capability: value)
        assert supports(hidden, weight) == (capability == 90)
        in_triton(linear)(hidden, weight, gated=True)
        assert called == [True] * (capability == 90)
    in_triton(linear)(hidden, weight)
    in_triton(linear)(hidden[:1000], weight, gated=True)
    assert len(called) == 1
    assert not supports(hidden.float(), weight.float())
    assert not supports(hidden[:, :60].contiguous(), weight[:, :60].contiguous())
    assert not supports(hidden, weight[:2040])


@pytest.mark.gpu
@TYPES
@pytest.mark.parametrize(("tokens", "rows", "k"), [(1024, 6144, 1024), (3001, 6144, 1024), (1500, 2048, 2048)])
def test_gate_and_up_agree_with_the_library_at_published_sizes(
    tokens: int, rows: int, k: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(tokens)
    hidden = torch.randn(tokens, k, device="cuda").to(dtype)
    weight = (torch.randn(rows, k, device="cuda") * k**-0.5).to(dtype)
    assert is_faster(tokens, rows)
    assert supports(hidden, weight)
    result = linear(hidden, weight, gated=True)
    gate, up = (hidden.float() @ weight.float().t()).chunk(2, -1)
    assert_near(result, (torch.nn.functional.silu(gate) * up).double().cpu(), dtype, steps=40)
    assert torch.equal(result, linear(hidden, weight, gated=True))
