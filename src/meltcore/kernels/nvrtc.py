"""Compiles and launches kernels of CUDA C++, for operations that Triton cannot express. NVRTC compiles at first launch.

Sources have no includes, because PyTorch comes with NVRTC but not with CUDA's headers. Binaries are kept in Triton's
cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch

from meltcore.common.errors import MeltcoreError
from meltcore.kernels.capability import capability
from meltcore.kernels.jit import triton

if TYPE_CHECKING:
    from cuda.bindings.driver import CUtensorMap

Argument: TypeAlias = "torch.Tensor | int | float | CUtensorMap"
INSTRUCTIONS = Path(__file__).with_name("instructions.cu")  # of Hopper, as functions: the first file of a source
WGMMA = Path(__file__).with_name("wgmma.cu")  # those of its warp groups, the second file


def compile_source(source: str, name: str, macros: Mapping[str, int], arch: int | str) -> bytes:
    """Compile CUDA C++ for one architecture (90: sm_90, "90a": sm_90a) and return the cubin. It needs no GPU.

    Raises MeltcoreError with NVRTC's messages if the source has an error.
    """
    from cuda.bindings import nvrtc

    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", "-default-device"]
    options += [f"-D{key}={value}" for key, value in macros.items()]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), 0, [], [])
    try:
        (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if error != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytes(nvrtc.nvrtcGetProgramLogSize(program)[1])  # b" " * 1 would be an object that Python shares
            nvrtc.nvrtcGetProgramLog(program, log)
            raise MeltcoreError(f"NVRTC cannot compile {name} for sm_{arch}: {log.decode().strip()}")
        cubin = bytes(nvrtc.nvrtcGetCUBINSize(program)[1])
        nvrtc.nvrtcGetCUBIN(program, cubin)
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(program)


class CudaKernel:
    """A kernel of CUDA C++ files beside the Python module that launches it, compiled per device and macros.

    The files are one source, in their order. With the suffix "a", as in sm_90a, a binary may use instructions that only
    one architecture has.
    """

    def __init__(self, paths: Sequence[Path], name: str, *, suffix: str = "") -> None:
        self._paths = paths
        self.name = name
        self._suffix = suffix

    def source(self) -> str:
        """Return the text of the files."""
        return "".join(path.read_text() for path in self._paths)

    def cubin(self, macros: Mapping[str, int], arch: int) -> bytes:
        """Return the binary for an architecture, compiled or from the cache folder."""
        if (path := self.cached_path(macros, arch)) is not None:
            return path.read_bytes()
        cubin = compile_source(self.source(), self._paths[-1].name, macros, f"{arch}{self._suffix}")
        self._cache(macros, arch).put(cubin, f"{self.name}.cubin", binary=True)
        return cubin

    def cached_path(self, macros: Mapping[str, int], arch: int) -> Path | None:
        """Return the binary's file in the cache folder, or None if it is not there."""
        path = self._cache(macros, arch).get_file(f"{self.name}.cubin")
        return None if path is None else Path(path)

    def _cache(self, macros: Mapping[str, int], arch: int) -> Any:
        from cuda.bindings import nvrtc

        version = nvrtc.nvrtcVersion()[1:]
        parts = self.source(), sorted(macros.items()), f"{arch}{self._suffix}", version
        return triton.runtime.cache.get_cache_manager(hashlib.sha256(repr(parts).encode()).hexdigest())

    def launch(
        self,
        grid: Sequence[int],
        threads: int,
        macros: tuple[tuple[str, int], ...],
        arguments: Sequence[Argument],
        device: torch.device,
        *,
        shared_bytes: int = 0,
        cooperative: bool = False,
        pdl: bool,
    ) -> None:
        """Launch on the current stream of `device`.

        Tensors are passed as pointers, numbers as 32-bit numbers, tensor maps by value. A block has `shared_bytes` of
        dynamic shared memory. With `cooperative` all blocks run concurrently, or the launch fails. With `pdl` the
        launch may start before the previous kernel has ended (see launch.py).
        """
        from cuda.bindings import driver

        if _report is not None:
            _report(Binary(self, macros, capability(device)))
            return
        index = device.index if device.index is not None else torch.cuda.current_device()
        function = _load(self, macros, shared_bytes, index)
        config = _config(grid, threads, shared_bytes, cooperative, pdl)
        config.hStream = torch.cuda.current_stream(device).cuda_stream
        values = tuple(each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments)
        types = tuple(_ctype(each) for each in arguments)
        _check(driver.cuLaunchKernelEx(config, function, (values, types), 0), f"launching {self.name}")


class Binary(NamedTuple):
    """A kernel for some macros and an architecture."""

    kernel: CudaKernel
    macros: tuple[tuple[str, int], ...]
    arch: int

    def is_compiled(self) -> bool:
        """Return whether the cache folder has the binary."""
        return self.kernel.cached_path(dict(self.macros), self.arch) is not None

    def compile(self) -> None:
        """Compile the binary if the cache folder lacks it."""
        self.kernel.cubin(dict(self.macros), self.arch)


_report: Callable[[Binary], None] | None = None


@contextmanager
def record_launches(report: Callable[[Binary], None]) -> Iterator[None]:
    """Return a context in which launches only report the binaries that they need.

    Outputs of skipped kernels may hold invalid indices.
    """
    global _report
    reported = set[Binary]()

    def report_new(binary: Binary) -> None:
        if binary not in reported:
            reported.add(binary)
            report(binary)

    _report = report_new
    try:
        yield
    finally:
        _report = None


def _ctype(argument: Argument) -> type[ctypes._SimpleCData[Any]] | None:
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p
    if isinstance(argument, float):
        return ctypes.c_float
    return ctypes.c_int if isinstance(argument, int) else None


def _config(grid: Sequence[int], threads: int, shared_bytes: int, cooperative: bool, pdl: bool) -> Any:
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = (*grid, 1, 1)[:3]
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = shared_bytes
    attributes = []
    if pdl:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


@cache
def _load(kernel: CudaKernel, macros: tuple[tuple[str, int], ...], shared_bytes: int, device_index: int) -> Any:
    from cuda.bindings import driver

    with torch.cuda.device(device_index):
        cubin = kernel.cubin(dict(macros), capability(torch.device("cuda", device_index)))
        (module,) = _check(driver.cuModuleLoadData(cubin), f"loading {kernel.name}")
        (function,) = _check(driver.cuModuleGetFunction(module, kernel.name.encode()), f"finding {kernel.name}")
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(function, limit, shared_bytes), f"giving {kernel.name} shared memory")
    return function


def _check(result: tuple[Any, ...], action: str) -> tuple[Any, ...]:
    error, *values = result
    if error.value:
        raise MeltcoreError(f"CUDA error {error.name} when {action}")
    return tuple(values)
