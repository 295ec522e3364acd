"""Split-K GEMM against float64, with one split and several, and which GEMMs it supports."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from test_linear import TYPES, assert_near, assert_rounded_once, exact, exact_gated, random_matmul

from meltcore.kernels.capability import shared_memory_bytes
from meltcore.kernels.gemm.split_k import GemmConfig, select_config, split_counters, split_k_gemm, supports

SHAPES = pytest.mark.parametrize(
    ("seed", "tokens", "n", "k"),
    [(0, 17, 70, 192), (1, 64, 33, 1536), (2, 40, 2, 64), (3, 3, 130, 1024), (4, 77, 66, 512)],
)


@TYPES
@SHAPES
def test_gemm_is_rounded_once(seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device) -> None:
    hidden, weight = random_matmul(seed, tokens, n, k, dtype)
    result = split_k_gemm(hidden.to(device), weight.to(device))
    assert result.shape == (tokens, n)
    assert_rounded_once(result, exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_sum_with_the_residual_is_rounded_once(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_matmul(seed, tokens, n, k, dtype)
    before = torch.randn(tokens, n).to(dtype)
    residual = before.to(device, copy=True)
    assert split_k_gemm(hidden.to(device), weight.to(device), residual=residual) is residual
    assert_rounded_once(residual, before.double() + exact(hidden, weight), dtype)


@TYPES
@SHAPES
def test_gemm_fuses_the_activation(
    seed: int, tokens: int, n: int, k: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden, weight = random_matmul(seed, tokens, 2 * n, k, dtype)
    result = split_k_gemm(hidden.to(device), weight.to(device), gated=True)
    assert result.shape == (tokens, n)
    assert_near(result, exact_gated(hidden, weight), dtype, steps=10)


@pytest.mark.slow
@pytest.mark.parametrize("split_k", [1, 2, 4])
@pytest.mark.parametrize("rows", [32, 64])
def test_splits_are_reduced_deterministically(rows: int, split_k: int, device: torch.device) -> None:
    """Two launches give the same bits, and the counters are zero for the next launch."""
    hidden, weight = (tensor.to(device) for tensor in random_matmul(split_k, 37, 3 * rows + 5, 512, torch.bfloat16))
    config = GemmConfig(32, rows, 64, num_stages=2, split_k=split_k)
    first, second = (split_k_gemm(hidden, weight, config=config) for _ in range(2))
    assert_rounded_once(first, exact(hidden.cpu(), weight.cpu()), torch.bfloat16)
    assert torch.equal(first, second)
    assert not split_counters(device).any()


def test_memory_behind_the_result_is_not_written(device: torch.device) -> None:
    hidden, weight = random_matmul(0, 19, 21, 64, torch.bfloat16)
    kept = torch.full((19 * 21 + 64,), 7.0, dtype=torch.bfloat16, device=device)
    split_k_gemm(hidden.to(device), weight.to(device), residual=kept[: 19 * 21].view(19, 21))
    assert (kept[19 * 21 :] == 7.0).all()


@pytest.mark.parametrize("shared", [shared_memory_bytes(torch.device("cpu")), 163 * 1024, 227 * 1024])
def test_select_config_divides_the_gemm_evenly(shared: int) -> None:
    tokens_of, rows_of = (1, 16, 32, 33, 64, 65, 128), (896, 1024, 2048, 4096, 6144)
    for tokens, rows, k in product(tokens_of, rows_of, (64, 192, 896, 1024, 3072, 4864, 8960)):
        config, gemm = select_config(tokens, rows, k, 132, shared), (tokens, rows, k)
        tiles = -(-rows // config.block_n) * -(-tokens // config.block_m)
        assert k % (config.split_k * config.block_k) == 0, gemm
        assert config.split_k == 1 or tiles * config.split_k <= 132, gemm
        assert config.num_stages >= 2, gemm
        assert 2 * (config.block_m + config.block_n) * config.block_k * config.num_stages <= shared, gemm


def test_split_k_supports() -> None:
    hidden, weight = random_matmul(0, 20, 8, 128, torch.bfloat16)
    assert supports(hidden, weight)
    assert not supports(hidden[:0], weight)
    assert not supports(hidden.repeat(7, 1), weight)
    assert not supports(hidden, weight.repeat(2049, 1))
    assert not supports(hidden.float(), weight.float())
    assert not supports(hidden[:, :96].contiguous(), weight[:, :96].contiguous())
    assert not supports(hidden[:, :64], weight[:, :64].contiguous())


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [(4096, 4096, True), (4160, 4096, False), (5376, 21504, False), (12352, 2048, True), (1024, 14336, True)],
)
def test_large_weights_of_long_rows_are_left_to_the_library(rows: int, columns: int, expected: bool) -> None:
    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta")
    for tokens in (1, 2, 16, 64):
        assert supports(torch.empty(tokens, columns, dtype=torch.bfloat16, device="meta"), weight) == expected
