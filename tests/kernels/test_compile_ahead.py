"""Compiles concurrently the kernels that a warm-up launches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
from compile_tools import AbsentGPU, children, store_kernel
from kernel_tools import ModelShape
from triton.runtime.jit import JITFunction

from meltcore.engine.worker.compile_workers import CompileWorkers
from meltcore.engine.worker.warm_up import CompileOrder, compile_ahead
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.nvrtc import Binary

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
        missing = compile_ahead(partial(warm_up_kernels, dtype), lambda: None, CompileWorkers(0))
        found.append((missing, len(gpu.launchers)))
    return found


def failing() -> int:
    def broken() -> None:
        warm_up_kernels(torch.bfloat16)
        raise ValueError("half way")

    try:
        compile_ahead(broken, lambda: None, CompileWorkers(0))
    except ValueError:
        return compile_ahead(partial(warm_up_kernels, torch.bfloat16), lambda: None, CompileWorkers(0))
    return -1


class NumberedGPU(AbsentGPU):
    """Another GPU of the same architecture: functions keep what they compiled for a GPU."""

    def __init__(self, number: int) -> None:
        super().__init__(90)
        self.number = number

    def get_current_device(self) -> int:
        return self.number


def with_workers(folder: Path, *, dead: bool) -> tuple[int, int, int, list[str]]:
    """(missing kernels, kernels that this process compiled, found in the cache, why) with an empty cache folder."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    triton.runtime.driver._active = NumberedGPU(91 + dead)
    compiled = Counter[bool]()
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.update([cache_hit])
    reasons: list[str] = []
    workers = CompileWorkers(2, report=reasons.append)
    (pid,) = children(os.getpid())
    if dead:
        os.kill(pid, signal.SIGKILL)
    try:
        missing = compile_ahead(partial(warm_up_kernels, torch.float32), lambda: None, workers)
    finally:
        workers.close()
        triton.knobs.compilation.listener = None
        assert not Path(f"/proc/{pid}").exists(), "closed, the workers' parent has ended"
        del os.environ["TRITON_CACHE_DIR"]
    return missing, compiled[False], compiled[True], reasons


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
@pytest.mark.parametrize("dead", [False, True])
def test_workers_compile_all_kernels_while_they_live(
    elsewhere: ProcessPoolExecutor, dead: bool, tmp_path: Path
) -> None:
    missing, compiled, found, reasons = elsewhere.submit(with_workers, tmp_path, dead=dead).result(timeout=240)
    assert missing > 3
    assert compiled == (missing if dead else 0)
    assert found == missing - compiled
    assert reasons == (["a process that compiles kernels has ended"] if dead else [])


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


def compiled_during_rehearsal(folder: Path) -> tuple[int, bool]:
    """(missing kernels, whether the one in CUDA C++ was compiled before the rehearsal's end)."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    triton.runtime.driver._active = AbsentGPU(90)
    kernel, out, macros = store_kernel(folder), torch.empty(1, device="meta"), (("SIZE", 3),)
    done = False

    def steps() -> None:
        nonlocal done
        for _ in range(2):
            kernel.launch((1,), 32, macros, [out], out.device, pdl=False)
        end_s = time.monotonic() + 60
        while not done and time.monotonic() < end_s:
            done = Binary(kernel, macros, 90).is_compiled()

    try:
        return compile_ahead(steps, lambda: None, CompileWorkers(0)), done
    finally:
        del os.environ["TRITON_CACHE_DIR"]


@pytest.mark.slow
def test_cuda_sources_compile_during_the_rehearsal(elsewhere: ProcessPoolExecutor, tmp_path: Path) -> None:
    assert elsewhere.submit(compiled_during_rehearsal, tmp_path).result(timeout=240) == (1, True)
