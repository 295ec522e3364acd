"""Compiles concurrently the kernels that a warm-up launches."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
from compile_tools import AbsentGPU, children, store_kernel
from kernel_tools import ModelShape
from triton.runtime.jit import JITFunction
from waiting import WAIT_S

from meltcore.engine.worker.compile_workers import CompileWorkers
from meltcore.engine.worker.warm_up import CompileOrder, _Jobs, compile_ahead
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.nvrtc import Binary

SHAPE = ModelShape(hidden_size=64, intermediate_size=96, heads=4, kv_heads=2, head_dim=16, page_size=64)


def without_gpu() -> None:
    triton.runtime.driver._active = AbsentGPU(90)
    force_implementation("triton")


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


COSTS = (30, 50, 10, 40, 20, 60)  # of jobs, in the order in which they are found


def begun(order: CompileOrder) -> tuple[list[int], list[int]]:
    """The costs of jobs that one thread begins while they are found, which all wait for the first one, and after."""
    costs: list[int] = []
    go_on, early = threading.Event(), 0
    with ThreadPoolExecutor(1) as pool:
        jobs = _Jobs(pool, order)
        for index, cost in enumerate(COSTS):
            jobs.add(cost, lambda cost=cost: (costs.append(cost), go_on.wait(WAIT_S)))
            while order.is_assigned(index) and not costs:
                time.sleep(0.001)
        early = len(costs)
        go_on.set()
        assert jobs.finish() == len(COSTS)
    return costs[:early], costs[early:]


def test_first_job_begins_immediately_then_the_longest() -> None:
    assert begun(CompileOrder()) == ([30], [60, 50, 40, 20, 10])


def test_ranks_begin_with_different_jobs_and_do_all() -> None:
    """Where another rank is busy with its longest ones, the rest of them, the shortest first."""
    assert begun(CompileOrder(0, 2)) == ([30], [20, 10, 40, 50, 60])
    assert begun(CompileOrder(1, 2)) == ([50], [60, 40, 10, 20, 30])
    for count in (1, 3, 8):
        first = [begun(CompileOrder(rank, count))[0] for rank in range(count)]
        assert sorted(cost for costs in first for cost in costs) == sorted(COSTS[:count])


def test_error_of_a_job_is_raised_and_none_begins_after_cancel() -> None:
    begun = []

    def fail() -> None:
        raise ValueError("no such instruction")

    with ThreadPoolExecutor(1) as pool:
        jobs = _Jobs(pool, CompileOrder())
        jobs.add(2, fail)
        with pytest.raises(ValueError, match="no such instruction"):
            jobs.finish()
        jobs.cancel()
        with pytest.raises(RuntimeError):
            jobs.add(1, lambda: begun.append(1))
    assert begun == []


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


def launched_during_rehearsal(folder: Path) -> tuple[int, list[bool], bool]:
    """(missing kernels, of each launch whether it would run on the GPU, whether workers compiled meanwhile)."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    triton.runtime.driver._active = NumberedGPU(93)
    launched: list[bool] = []
    run = JITFunction.run

    def note(function: JITFunction, *args: object, warmup: bool, **kwargs: object) -> object:
        launched.append(not warmup)
        return run(function, *args, warmup=True, **kwargs)

    JITFunction.run = note  # type: ignore[method-assign]
    workers, done = CompileWorkers(2), False

    def steps() -> None:
        nonlocal done
        warm_up_kernels(torch.bfloat16)
        end_s = time.monotonic() + 60
        while not done and time.monotonic() < end_s:
            done = any(folder.glob("*/*.cubin"))
        time.sleep(0.5)  # for this process to load it
        warm_up_kernels(torch.bfloat16)

    try:
        missing = compile_ahead(steps, lambda: None, workers)
        during = list(launched)
        warm_up_kernels(torch.bfloat16)
    finally:
        workers.close()
        JITFunction.run = run  # type: ignore[method-assign]
        del os.environ["TRITON_CACHE_DIR"]
    assert len(launched) * 2 == len(during) * 3
    assert all(launched[len(during) :]), "after it, kernels are launched"
    return missing, during, done


@pytest.mark.slow
def test_kernels_compile_during_the_rehearsal_which_launches_none(
    elsewhere: ProcessPoolExecutor, tmp_path: Path
) -> None:
    missing, launched, done = elsewhere.submit(launched_during_rehearsal, tmp_path).result(timeout=240)
    assert done, "a worker compiles while the rehearsal goes on"
    assert len(launched) > missing > 3
    assert not any(launched), "also those that are compiled by then"


@pytest.mark.slow
def test_cuda_sources_compile_during_the_rehearsal(elsewhere: ProcessPoolExecutor, tmp_path: Path) -> None:
    assert elsewhere.submit(compiled_during_rehearsal, tmp_path).result(timeout=240) == (1, True)
