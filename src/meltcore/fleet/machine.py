"""What a fleet may plan with on this machine: GPUs and their memory, from NVML, host memory, and checkpoints.

No torch: a plan must not create a CUDA context of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from meltcore.errors import ConfigError
from meltcore.fleet.placement import visible_gpus
from meltcore.host_memory import host_available_bytes
from meltcore.process import call_with_timeout
from meltcore.protocol.machine import Machine, VisibleGpu

_DRIVER_TIMEOUT_S = 60.0  # NVML takes several seconds on a machine of eight GPUs without persistence mode
_HUB_LIMIT_S = 15.0  # for all checkpoints together: half of what a node of a cluster has for its answer


def read_machine() -> Machine:
    """Return the visible GPUs and the available host memory. Raises ConfigError where NVML does not answer."""
    gpus, driver = read_gpus()
    return Machine(gpus, driver, host_available_bytes())


def read_gpus() -> tuple[tuple[VisibleGpu, ...], str]:
    """Return the visible GPUs and the driver's version; none and "" without a driver.

    Raises ConfigError where NVML fails or hangs, and for a CUDA_VISIBLE_DEVICES that names no GPU of this machine.
    """
    names = visible_gpus()
    if not names:
        return (), ""
    try:
        return call_with_timeout(_DRIVER_TIMEOUT_S, lambda: _query(names))
    except TimeoutError as error:
        raise ConfigError(f"the memory of the GPUs cannot be read: NVML gave {error}") from error


def unloadable(checkpoints: Iterable[str]) -> dict[str, str]:
    """Return which of these absolute paths and ids of the hub this machine cannot load, with the reason."""
    from meltcore.models.hub import hub_problems

    asked = list(checkpoints)
    paths = {path: "" if Path(path).exists() else "it is not there" for path in asked if path.startswith("/")}
    found = paths | hub_problems((model for model in asked if model not in paths), _HUB_LIMIT_S)
    return {checkpoint: problem for checkpoint, problem in found.items() if problem}


def process_bytes() -> dict[int, int]:
    """Return the bytes that each process has of the visible GPUs together, as NVML tells it.

    In a container NVML may number processes as the host does, or tell none. Raises ConfigError as `read_gpus` does.
    """
    names = visible_gpus()
    if not names:
        return {}
    try:
        return call_with_timeout(_DRIVER_TIMEOUT_S, lambda: _query_processes(names))
    except TimeoutError as error:
        raise ConfigError(f"the processes of the GPUs cannot be read: NVML gave {error}") from error


def _query_processes(names: list[str]) -> dict[int, int]:
    import pynvml

    found: dict[int, int] = {}
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    try:
        for name in names:
            for process in pynvml.nvmlDeviceGetComputeRunningProcesses(_handle(name)):
                if process.usedGpuMemory is not None:
                    found[process.pid] = found.get(process.pid, 0) + int(process.usedGpuMemory)
    except pynvml.NVMLError as error:
        raise ConfigError(f"the processes of the GPUs {', '.join(names)} cannot be read: {error}") from error
    finally:
        pynvml.nvmlShutdown()
    return found


def _query(names: list[str]) -> tuple[tuple[VisibleGpu, ...], str]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), ""  # no driver: engines find no GPU either
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return tuple(_read(number, name) for number, name in enumerate(names)), driver
    except pynvml.NVMLError as error:
        raise ConfigError(f"the memory of the GPUs {', '.join(names)} cannot be read: {error}") from error
    finally:
        pynvml.nvmlShutdown()


def _read(number: int, name: str) -> VisibleGpu:
    import pynvml

    handle = _handle(name)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return VisibleGpu(number, _text(pynvml.nvmlDeviceGetName(handle)), int(memory.total), int(memory.used))


def _handle(name: str) -> Any:
    """Return NVML's handle of a GPU as CUDA_VISIBLE_DEVICES names it: by number, UUID or the start of one."""
    import pynvml

    name = name.strip()
    if name.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(name))
    if name.startswith("MIG-"):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    matching = [handle for handle in handles if _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(name)]
    if len(matching) != 1:
        raise ConfigError(f"CUDA_VISIBLE_DEVICES names {name!r}, which matches {len(matching)} GPUs of this machine")
    return matching[0]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
