"""Compiles concurrently the kernels that a warm-up launches."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import pytest
import torch
import triton
from compile_tools import AbsentGPU
from kernel_tools import ModelShape
from triton.runtime.jit import JITFunction

from meltcore.engine.worker.warm_up import CompileOrder, compile_ahead
from meltcore.kernels.launch import force_implementation

SHAPE = ModelShape(hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, head_dim=16, page_size=64)


def without_gpu() -> None:
    """What is compiled is not launched."""
    triton.runtime.driver._active = AbsentGPU(90)
    force_implementation("triton")
    run = JITFunction.run

    def compiled(function: JITFunction, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        run(function, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compiled  # type: ignore[method-assign]


def warm_up_kernels(dtype: torch.dtype) -> None:
    import compile_cases_attention as cases  # where kernels are compiled, not in the process of the tests

    for launches in (cases.norm_cases, cases.step_io_cases):
        for launch in launches(SHAPE, dtype):
            launch()
            launch()  # noted once


def counts() -> list[tuple[int, int]]:
    """(missing kernels, launchers made): the first time, the second time, and in another type."""
    found = []
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16):
        gpu = triton.runtime.driver._active = AbsentGPU(90)
        found.append((compile_ahead(partial(warm_up_kernels, dtype), lambda: None), len(gpu.launchers)))
    return found


def failing() -> int:
    def broken() -> None:
        warm_up_kernels(torch.bfloat16)
        raise ValueError("half way")

    try:
        compile_ahead(broken, lambda: None)
    except ValueError:
        return compile_ahead(partial(warm_up_kernels, torch.bfloat16), lambda: None)
    return -1


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[ProcessPoolExecutor]:
    """A process of its own: Triton's interpreter leaves the language of this one patched."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), without_gpu) as pool:
        yield pool


@pytest.mark.slow
def test_compile_ahead_compiles_exactly_the_missing_kernels(elsewhere: ProcessPoolExecutor) -> None:
    found = elsewhere.submit(counts).result(timeout=240)
    assert all(missing == launchers for missing, launchers in found), found
    (first, _), (again, _), (other_type, _) = found
    assert first > 3
    assert again == 0
    assert 0 < other_type < first, "the tables of decode steps hold whole numbers only"


@pytest.mark.slow
def test_failed_warm_up_restores_the_compiler(elsewhere: ProcessPoolExecutor) -> None:
    assert elsewhere.submit(failing).result(timeout=240) >= 0


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_processes_start_compiling_at_different_kernels(count: int) -> None:
    orders = [CompileOrder(number, count).order(range(20)) for number in range(count)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    shares = [order[: 20 // count] for order in orders]
    assert len({item for share in shares for item in share}) == sum(map(len, shares)), (
        "two processes begin with one kernel"
    )
    assert orders[0] == list(range(20))
