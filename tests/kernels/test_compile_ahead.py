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
from compile_tools import AbsentGPU
from kernel_tools import ModelShape
from triton.runtime.jit import JITFunction

from meltcore.config import DebugSwitch, EngineConfig
from meltcore.engine.worker import warm_up as warm_up_file
from meltcore.engine.worker.compile_workers import CompileWorkers, worker_count
from meltcore.engine.worker.warm_up import CompileOrder, compile_ahead, make_compiler
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.nvrtc import Binary, CudaKernel

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


class NumberedGPU(AbsentGPU):
    """Another GPU of the same architecture: functions keep what they compiled for a GPU."""

    def __init__(self, number: int) -> None:
        super().__init__(90)
        self.number = number

    def get_current_device(self) -> int:
        return self.number


def with_workers(folder: Path, *, dead: bool) -> tuple[int, int, int]:
    """(missing kernels, kernels that this process compiled, found in the cache) with an empty cache folder."""
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    triton.runtime.driver._active = NumberedGPU(91 + dead)
    compiled = Counter[bool]()
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.update([cache_hit])
    workers = CompileWorkers(2)
    pid = workers._pid
    if dead:
        os.kill(workers._pid, signal.SIGKILL)
        os.waitpid(workers._pid, 0)
    try:
        missing = compile_ahead(partial(warm_up_kernels, torch.float32), lambda: None, workers=workers)
    finally:
        workers.close()
        triton.knobs.compilation.listener = None
        assert not Path(f"/proc/{pid}").exists(), "closed, the workers' parent has ended"
        del os.environ["TRITON_CACHE_DIR"]
    return missing, compiled[False], compiled[True]


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
    missing, compiled, found = elsewhere.submit(with_workers, tmp_path, dead=dead).result(timeout=240)
    assert missing > 3
    assert compiled == (missing if dead else 0)
    assert found == missing - compiled


def test_cores_decide_on_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    for cores in (1, 2, 4, 16, 64):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, cores=cores: set(range(cores)))
        counts.append((worker_count(1), worker_count(8)))
    assert counts == [(0, 0), (0, 0), (3, 0), (15, 0), (16, 7)]


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


def store_kernel(folder: Path) -> CudaKernel:
    path = folder / "store.cu"
    path.write_text('extern "C" __global__ void store(float* out) { out[0] = SIZE; }')
    return CudaKernel([path], "store")


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
        return compile_ahead(steps, lambda: None), done
    finally:
        del os.environ["TRITON_CACHE_DIR"]


@pytest.mark.slow
def test_cuda_sources_compile_during_the_rehearsal(elsewhere: ProcessPoolExecutor, tmp_path: Path) -> None:
    assert elsewhere.submit(compiled_during_rehearsal, tmp_path).result(timeout=240) == (1, True)


def test_workers_compile_cuda_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    kernel = store_kernel(tmp_path)
    good, bad = Binary(kernel, (("SIZE", 3),), 90), Binary(kernel, (), 90)
    workers = CompileWorkers(2)
    try:
        assert not good.is_compiled()
        assert workers.compile(good)
        assert good.is_compiled()
        assert kernel.cubin({"SIZE": 3}, 90)[:4] == b"\x7fELF"
        assert not workers.compile(bad), "SIZE is not defined"
        assert workers.compile(Binary(kernel, (("SIZE", 4),), 90)), "the worker goes on"
    finally:
        workers.close()
    assert not workers.compile(good), "closed"


@pytest.mark.parametrize("debug", [(), ("compile-workers",), ("reference-kernels",)])
def test_ranks_on_gpus_share_the_cores(debug: tuple[DebugSwitch, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(warm_up_file, "CompileWorkers", lambda count: count)
    config = EngineConfig(model="m", tensor_parallel_size=2, debug=debug)
    made = make_compiler(config, torch.device("cuda:1"), rank=1)
    if "reference-kernels" in debug:
        assert made is None
    else:
        assert made is not None
        assert (made.order, made.workers) == (CompileOrder(1, 2), 7 if "compile-workers" in debug else 0)
    assert make_compiler(config, torch.device("cpu")) is None
