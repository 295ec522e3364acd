"""Compiling kernels for architectures that are not here, in processes beside the tests."""

from __future__ import annotations

import importlib
import multiprocessing
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from meltcore.kernels.jit import ModelShape


class AbsentGPU:
    """What Triton asks its driver before it compiles, answered for an architecture that is not here."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled functions are remembered by device number

    def get_current_stream(self, device: int) -> int:
        return 0


class Binary(NamedTuple):
    """One compiled kernel. shared_bytes: what one block asks for."""

    kernel: str
    capability: int
    shared_bytes: int
    has_code: bool


class Task(NamedTuple):
    """The compile cases of one kernel file, by the module's name, for one architecture, model and type."""

    module: str
    capability: int
    shape: ModelShape
    dtype: torch.dtype


class CompilePool:
    """A process for each architecture, until `close`. A task given before it is asked for runs meanwhile.

    Not one for several: once it has compiled for sm_90, Triton 3.6 converts FP8 for sm_89 by what only sm_90 has.
    """

    def __init__(self) -> None:
        self._workers: dict[int, ProcessPoolExecutor] = {}
        self._given: dict[Task, Future[list[Binary]]] = {}

    def give(self, task: Task) -> Future[list[Binary]]:
        if task.capability not in self._workers:
            # Not forked: torch's threads do not survive it.
            context = multiprocessing.get_context("spawn")
            self._workers[task.capability] = ProcessPoolExecutor(1, mp_context=context)
        if task not in self._given:
            self._given[task] = self._workers[task.capability].submit(compile_file, task)
        return self._given[task]

    def close(self) -> None:
        for workers in self._workers.values():
            workers.shutdown(cancel_futures=True)


def compile_file(task: Task) -> list[Binary]:
    """Launch the file's cases, compiling in the place of running. For a process of its own: Triton stays patched."""
    run = getattr(compile_file, "run", JITFunction.run)
    compile_file.run = run  # type: ignore[attr-defined]
    compiled: list[Binary] = []

    def compile_only(function: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        binary = run(function, *args, grid=grid, warmup=True, **kwargs)
        arch = binary.metadata.target.arch
        compiled.append(Binary(function.__name__, arch, binary.metadata.shared, "cubin" in binary.asm))

    JITFunction.run = compile_only
    triton.runtime.driver._active = AbsentGPU(task.capability)
    for case in importlib.import_module(task.module).compile_cases(task.shape, task.dtype):
        case()
    return compiled
