"""Experts of one token in two launches: against float64, and when they are taken."""

from __future__ import annotations

import pytest
import torch
from test_attention_kernels import interpreter_of_loops_and_dots  # noqa: F401, applies here too
from test_expert_kernels import Problem, assert_near

from meltcore.kernels import experts as experts_file
from meltcore.kernels import one_token_experts as one_token_file
from meltcore.kernels.one_token_experts import DownLaunch, suits_one_token_experts
from meltcore.kernels.routing import Routing

SHAPES = [
    # experts, choices, size, width, dtype
    (6, 3, 128, 64, torch.bfloat16),
    (9, 8, 64, 192, torch.float16),  # an expert's rows in three pieces
    (5, 1, 192, 128, torch.bfloat16),
    (4, 4, 1088, 64, torch.float16),  # rows and columns past the end of their blocks
]


@pytest.mark.parametrize("added", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize(("experts", "choices", "size", "width", "dtype"), SHAPES)
def test_a_token_gets_the_weighted_sum_of_all_its_experts(
    experts: int, choices: int, size: int, width: int, dtype: torch.dtype, added: bool, device: torch.device
) -> None:
    problem = Problem(size + added, 1, experts, choices, size, width, dtype)
    if not added:
        problem.residual.zero_()
    given = [tensor.to(device, copy=True) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    assert suits_one_token_experts(given[0], routing, *given[1:])
    residual = problem.residual.to(device, copy=True) if added else None
    result = experts_file._experts_add_triton(residual, given[0], routing, *given[1:])
    if added:
        assert result is residual
    assert_near(result.cpu(), problem.exact(), dtype)


def test_where_pairs_are_to_be_found_in_a_given_way_they_are(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = Problem(1, 1, 6, 3, 128, 64, torch.bfloat16)
    monkeypatch.setattr(experts_file, "one_token_experts", None)
    routing = Routing(*(tensor.to(device) for tensor in problem.routing))
    given = [tensor.to(device, copy=True) for tensor in (problem.hidden, problem.gate_up, problem.down)]
    residual = problem.residual.to(device, copy=True)
    result = experts_file._experts_add_triton(residual, given[0], routing, *given[1:], form="alone")
    assert_near(result.cpu(), problem.exact(), torch.bfloat16)


@pytest.mark.parametrize(
    ("tokens", "dtype", "size", "width", "suits"),
    [
        (1, torch.bfloat16, 128, 64, True),
        (2, torch.bfloat16, 128, 64, False),
        (1, torch.float32, 128, 64, False),
        (1, torch.bfloat16, 96, 64, False),
        (1, torch.bfloat16, 128, 96, False),
        (1, torch.bfloat16, 8192, 64, False),
    ],
)
def test_other_work_goes_through_the_general_products(
    tokens: int, dtype: torch.dtype, size: int, width: int, suits: bool
) -> None:
    hidden, gate_up, down = (
        torch.empty(shape, dtype=dtype) for shape in ((tokens, size), (8, 2 * width, size), (8, size, width))
    )
    routing = Routing(torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2))
    assert suits_one_token_experts(hidden, routing, gate_up, down) == suits


@pytest.mark.parametrize(
    ("size", "width", "choices", "launch"),
    [
        (2048, 512, 9, DownLaunch(rows=4, columns=512, warps=2)),  # Qwen3.5-35B-A3B
        (2048, 64, 9, DownLaunch(rows=8, columns=64, warps=1)),  # the same on eight ranks
        (2048, 768, 8, DownLaunch(rows=2, columns=256, warps=2)),  # Qwen3-30B-A3B
        (2048, 192, 64, None),
    ],
)
def test_a_thread_holds_no_more_than_its_registers(
    size: int, width: int, choices: int, launch: DownLaunch | None
) -> None:
    assert DownLaunch.of(size, width, choices) == launch
    if launch is not None:
        pieces = choices * width // launch.columns
        assert launch.rows * launch.columns * pieces <= one_token_file._MOST_HELD_DOWN * 32 * launch.warps
