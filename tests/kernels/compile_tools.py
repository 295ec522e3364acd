"""Compiles kernels for absent architectures, in processes beside the tests."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from cuda.bindings import nvrtc
from kernel_tools import ModelShape
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from meltcore.common.process import stat_fields
from meltcore.kernels.launch import force_implementation
from meltcore.kernels.nvrtc import CudaKernel, compile_source


class AbsentGPU:
    """A driver for Triton's compiler that reports the properties of an absent architecture."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.launchers: list[str] = []

    def launcher_cls(self, src: object, metadata: Any) -> None:
        """Records launchers: making one needs the driver's library, which is absent too."""
        self.launchers.append(metadata.name)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled functions are remembered by device number

    def get_current_stream(self, device: int) -> int:
        return 0


def store_kernel(folder: Path) -> CudaKernel:
    """A kernel in CUDA C++ that needs the macro SIZE."""
    path = folder / "store.cu"
    path.write_text('extern "C" __global__ void store(float* out) { out[0] = SIZE; }')
    return CudaKernel([path], "store")


def check_compiles(kernel: CudaKernel, macros: Mapping[str, int], arch: int | str, *, to_ptx: bool) -> None:
    """Compile a kernel by NVRTC, which needs no GPU: to PTX, which takes half the time, or to a binary.

    Formats of weights differ in the C++ that decodes them, so a test needs the binary of one of them alone.
    """
    if not to_ptx:
        assert compile_source(kernel.source(), kernel.name, macros, arch)
        return
    options = [f"--gpu-architecture=compute_{arch}", "--std=c++17", "-default-device"]
    options += [f"-D{key}={value}" for key, value in macros.items()]
    _, program = nvrtc.nvrtcCreateProgram(kernel.source().encode(), kernel.name.encode(), 0, [], [])
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])  # one byte without an error
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    assert ord(bytes([32])) == 32, "NVRTC has written into a byte that Python shares"


def children(parent: int) -> list[int]:
    """The processes that a process has started, in the order of their ids."""
    ids = sorted(int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return [pid for pid in ids if (fields := stat_fields(pid)) is not None and int(fields[1]) == parent]


class Binary(NamedTuple):
    """One compiled kernel. shared_bytes: what one block asks for; hash: the same for the same code and settings."""

    kernel: str
    capability: int
    shared_bytes: int
    has_code: bool
    hash: str


class Task(NamedTuple):
    """The compile cases of one kernel file, by the module's name, for one architecture, model and type.

    first, stride: which of the cases, as of a slice. is_once: each kernel once, as the first of these cases has it.
    """

    module: str
    capability: int
    shape: ModelShape
    dtype: torch.dtype
    first: int = 0
    stride: int = 1
    is_once: bool = False


class CompilePool:
    """A process for each architecture, until `close`. Tasks submitted early run in the meantime.

    Not one for several: once it has compiled for sm_90, Triton 3.6 converts FP8 for sm_89 by what only sm_90 has.
    Not the process of the tests: Triton's interpreter leaves the language patched, and nothing compiles after that.
    """

    def __init__(self) -> None:
        self._workers: dict[int, ProcessPoolExecutor] = {}
        self._given: dict[Task, Future[list[Binary]]] = {}

    def give(self, task: Task) -> Future[list[Binary]]:
        if task not in self._given:
            self._given[task] = self._worker(task.capability).submit(compile_file, task)
        return self._given[task]

    def launch(self, capability: int, launch: Callable[..., None], *calls: object) -> Future[list[Binary]]:
        """What a module's function launches, called with each of the arguments."""
        return self._worker(capability).submit(compile_launches, [partial(launch, call) for call in calls])

    def close(self) -> None:
        for workers in self._workers.values():
            workers.shutdown(cancel_futures=True)

    def _worker(self, capability: int) -> ProcessPoolExecutor:
        if capability not in self._workers:
            # Not forked: torch's threads do not survive it.
            context = multiprocessing.get_context("spawn")
            self._workers[capability] = ProcessPoolExecutor(1, context, only_compile_for, (capability,))
        return self._workers[capability]


_compiled: list[Binary] = []  # since the last task of this process
_once = False  # whether that task compiles each kernel once


def only_compile_for(capability: int) -> None:
    """From here on this process compiles kernels instead of running them, for an absent GPU."""
    triton.runtime.driver._active = AbsentGPU(capability)
    force_implementation("triton")
    run = JITFunction.run

    def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if _once and any(each.kernel == function.__name__ for each in _compiled):
            return
        binary = run(function, *args, grid=grid, warmup=True, **kwargs)
        made = binary.metadata
        _compiled.append(Binary(function.__name__, made.target.arch, made.shared, "cubin" in binary.asm, binary.hash))

    JITFunction.run = compile_only


def compile_launches(launches: Iterable[Callable[[], object]], *, is_once: bool = False) -> list[Binary]:
    global _once
    _once = is_once
    _compiled.clear()
    for launch in launches:
        launch()
    return list(_compiled)


def compile_file(task: Task) -> list[Binary]:
    # Where the pool's processes import kernels, not the process of the tests.
    import compile_cases_attention
    import compile_cases_gemm

    cases = (compile_cases_attention.BY_NAME | compile_cases_gemm.BY_NAME)[task.module]
    chosen = cases(task.shape, task.dtype)[task.first :: task.stride]
    return compile_launches(chosen, is_once=task.is_once)
