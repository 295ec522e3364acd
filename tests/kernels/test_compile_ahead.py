"""Compiling side by side what a rehearsal has noted."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
import triton
from compile_tools import AbsentGPU
from triton.runtime.jit import JITFunction

from meltcore.engine.compile_ahead import Turn, compile_ahead
from meltcore.kernels import decode_tables, norm
from meltcore.kernels.jit import ModelShape

SHAPE = ModelShape(hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, head_dim=16, page_size=64)


def without_gpu() -> None:
    """What is compiled is not launched."""
    triton.runtime.driver._active = AbsentGPU(90)
    run = JITFunction.run

    def compiled(function: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        run(function, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compiled  # type: ignore[method-assign]


def rehearse(dtype: torch.dtype) -> None:
    for module in (norm, decode_tables):
        for launch in module.compile_cases(SHAPE, dtype):
            launch()
            launch()  # noted once


def counts() -> list[tuple[int, int]]:
    """How many were missing, and how many launchers were made: at first, the second time, and in a type whose norms are
    others."""
    found = []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16):
        gpu = triton.runtime.driver._active = AbsentGPU(90)
        found.append((compile_ahead(partial(rehearse, dtype), lambda: None), len(gpu.launchers)))
    return found


def failing() -> int:
    def broken() -> None:
        rehearse(torch.bfloat16)
        raise ValueError("half way")

    try:
        compile_ahead(broken, lambda: None)
    except ValueError:
        return compile_ahead(partial(rehearse, torch.bfloat16), lambda: None)
    return -1


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: Triton's interpreter leaves the language of this one patched."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), without_gpu) as pool:
        yield pool


def test_all_that_was_missing_is_there_afterwards_and_only_that(elsewhere: ProcessPoolExecutor) -> None:
    found = elsewhere.submit(counts).result(timeout=240)
    assert all(missing == launchers for missing, launchers in found), found
    (first, _), (again, _), (other_type, _) = found
    assert first > 3
    assert again == 0
    assert 0 < other_type < first, "the tables of decode steps hold whole numbers only"


def test_a_rehearsal_that_fails_leaves_the_compiler_as_it_was(elsewhere: ProcessPoolExecutor) -> None:
    assert elsewhere.submit(failing).result(timeout=240) >= 0


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_processes_that_need_the_same_begin_at_unlike_places(count: int) -> None:
    orders = [Turn(number, count).order(range(20)) for number in range(count)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    shares = [order[: 20 // count] for order in orders]
    assert len({item for share in shares for item in share}) == sum(map(len, shares)), "nobody begins with another's"
    assert orders[0] == list(range(20))
