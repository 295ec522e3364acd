"""Runs kernels of CUDA C++ on the CPU, where cuda_emulation.h takes the place of their first file, instructions.cu."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from meltcore.kernels.nvrtc import Argument, CudaKernel

COMPILER = shutil.which("c++")
_ENTRY = """
extern "C" const char* emulate(void** arguments, int blocks, int threads, int shared_bytes, u32 seed) {{
    return launch({}, arguments, blocks, threads, shared_bytes, seed);
}}
"""


def emulate_launches(kernel: CudaKernel, file: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Make launches of a kernel, whose source is `file`, run on the CPU. Returns the seeds of those that ran."""
    seeds: list[int] = []

    @cache
    def emulated(macros: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
        """The kernel as a function of the CPU."""
        assert COMPILER is not None
        source, library = (folder / f"kernel{len(seeds)}.{suffix}" for suffix in ("cpp", "so"))
        header = Path(__file__).with_name("cuda_emulation.h").read_text()
        source.write_text(header + file.read_text() + _ENTRY.format(kernel.name))
        options = ["-O2", "-std=c++17", "-fPIC", "-shared", "-w", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
        defined = [f"-D{key}={value}" for key, value in macros]
        subprocess.run([COMPILER, *options, *defined, "-o", str(library), str(source)], check=True, timeout=200)
        loaded = ctypes.CDLL(str(library))
        loaded.emulate.restype = ctypes.c_char_p
        return loaded

    def launch(
        grid: Sequence[int],
        threads: int,
        macros: tuple[tuple[str, int], ...],
        arguments: Sequence[Argument],
        *_: object,
        shared_bytes: int = 0,
        **__: object,
    ) -> None:
        values = [_as_ctypes(each) for each in arguments]
        addresses = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        failure = emulated(macros).emulate(addresses, grid[0], threads, shared_bytes, len(seeds))
        assert failure is None, failure.decode()
        seeds.append(len(seeds))

    monkeypatch.setattr(kernel, "launch", launch)
    return seeds


def _as_ctypes(argument: Argument) -> ctypes.c_void_p | ctypes.c_float | ctypes.c_int:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_float(argument) if isinstance(argument, float) else ctypes.c_int(argument)
