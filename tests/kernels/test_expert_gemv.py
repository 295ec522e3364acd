"""Experts of one token in two launches: against float64, and when they are used."""

from __future__ import annotations

import pytest
import torch
from kernel_tools import in_triton
from test_grouped_gemm import Problem, assert_near

from meltcore.kernels.gemm.gemv import GemvConfig
from meltcore.kernels.moe import expert_gemv as expert_gemv_file
from meltcore.kernels.moe.expert_gemv import down_config, supports
from meltcore.kernels.moe.experts import add_experts
from meltcore.kernels.moe.routing import Routing

SHAPES = [
    # experts, top_k, size, width, dtype
    (6, 3, 128, 64, torch.bfloat16),
    (9, 8, 64, 192, torch.float16),  # an expert's rows in three loads
    (5, 1, 192, 128, torch.bfloat16),
    (4, 4, 1088, 64, torch.float16),  # rows and columns past the end of their blocks
]


@pytest.mark.slow
@pytest.mark.parametrize("added", [True, False], ids=["residual", "no-residual"])
@pytest.mark.parametrize(("experts", "top_k", "size", "width", "dtype"), SHAPES)
def test_token_gets_the_weighted_sum_of_its_experts(
    experts: int, top_k: int, size: int, width: int, dtype: torch.dtype, added: bool, device: torch.device
) -> None:
    problem = Problem(size + added, 1, experts, top_k, size, width, dtype)
    if not added:
        problem.residual.zero_()
    given = [tensor.to(device, copy=True) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    assert supports(given[0], routing, *given[1:])
    residual = problem.residual.to(device, copy=True) if added else None
    result = in_triton(add_experts)(residual, given[0], routing, *given[1:])
    if added:
        assert result is residual
    assert_near(result.cpu(), problem.exact(), dtype)


def test_given_mode_is_used(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(1, 1, 6, 3, 128, 64, torch.bfloat16)
    monkeypatch.setattr(expert_gemv_file, "expert_gemv", None)
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    given = [tensor.to(device, copy=True) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    residual = problem.residual.to(device, copy=True)
    result = in_triton(add_experts)(residual, given[0], routing, *given[1:], mode="gemv")
    assert_near(result.cpu(), problem.exact(), torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "dtype", "size", "width", "expected"),
    [
        (1, torch.bfloat16, 128, 64, True),
        (2, torch.bfloat16, 128, 64, False),
        (1, torch.float32, 128, 64, False),
        (1, torch.bfloat16, 96, 64, False),
        (1, torch.bfloat16, 128, 96, False),
        (1, torch.bfloat16, 8192, 64, False),
    ],
)
def test_expert_gemv_supports(tokens: int, dtype: torch.dtype, size: int, width: int, expected: bool) -> None:
    hidden, gate_up, down = (
        torch.empty(shape, dtype=dtype) for shape in ((tokens, size), (8, 2 * width, size), (8, size, width))
    )
    routing = Routing(torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2))
    assert supports(hidden, routing, gate_up, down) == expected


@pytest.mark.parametrize(
    ("size", "width", "top_k", "config"),
    [
        (2048, 512, 9, GemvConfig(block_n=4, block_k=512, num_warps=2)),  # Qwen3.5-35B-A3B
        (2048, 64, 9, GemvConfig(block_n=8, block_k=64, num_warps=1)),  # the same on eight ranks
        (2048, 768, 8, GemvConfig(block_n=2, block_k=256, num_warps=2)),  # Qwen3-30B-A3B
        (2048, 192, 64, None),
    ],
)
def test_down_config_fits_into_registers(size: int, width: int, top_k: int, config: GemvConfig | None) -> None:
    assert down_config(size, width, top_k) == config
    if config is not None:
        loads = top_k * width // config.block_k
        assert config.block_n * config.block_k * loads <= expert_gemv_file._MAX_DOWN_ELEMENTS * 32 * config.num_warps
