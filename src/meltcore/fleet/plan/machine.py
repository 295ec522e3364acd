"""What a fleet may plan with on this machine: GPUs and their memory, from NVML, host memory, and checkpoints.

No torch: a plan must not create a CUDA context of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.common.host_memory import host_available_bytes
from meltcore.common.machine import DRIVER_TIMEOUT_S, VISIBLE, Machine, VisibleGpu, visible_gpus
from meltcore.common.options import is_number
from meltcore.common.process import call_with_timeout

_HUB_LIMIT_S = 15.0  # for all checkpoints together: half of what a node of a cluster has for its answer


def read_machine() -> Machine:
    """Return the visible GPUs and the available host memory, or why GPUs that seem to be there cannot be used."""
    try:
        gpus, driver = read_gpus()
    except ConfigError as error:
        return Machine((), "", host_available_bytes(), str(error))
    return Machine(gpus, driver, host_available_bytes())


def read_gpus() -> tuple[tuple[VisibleGpu, ...], str]:
    """Return the visible GPUs and the driver's version; none and "" without a GPU.

    Raises ConfigError where NVML fails or hangs, and for a CUDA_VISIBLE_DEVICES that does not name GPUs of this machine
    as CUDA would find them.
    """
    names = visible_gpus()
    if not names:
        return (), ""
    try:
        return call_with_timeout(DRIVER_TIMEOUT_S, lambda: _query(names))
    except TimeoutError as error:
        raise ConfigError(f"the memory of the GPUs cannot be read: NVML gave {error}") from error


def unloadable(checkpoints: Iterable[str]) -> dict[str, str]:
    """Return which of these absolute paths and ids of the hub this machine cannot load, with the reason."""
    from meltcore.models.checkpoints.hub import hub_problems

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
        return call_with_timeout(DRIVER_TIMEOUT_S, lambda: _query_processes(names))
    except TimeoutError as error:
        raise ConfigError(f"the processes of the GPUs cannot be read: NVML gave {error}") from error


def _query_processes(names: list[str]) -> dict[int, int]:
    import pynvml

    found: dict[int, int] = {}
    try:
        with _nvml(names) as handles:
            for handle in handles:
                for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
                    if process.usedGpuMemory is not None:
                        found[process.pid] = found.get(process.pid, 0) + int(process.usedGpuMemory)
    except pynvml.NVMLError as error:
        raise ConfigError(f"the processes of the GPUs {', '.join(names)} cannot be read: {error}") from error
    return found


def _query(names: list[str]) -> tuple[tuple[VisibleGpu, ...], str]:
    import pynvml

    try:
        with _nvml(names) as handles:
            driver = _text(pynvml.nvmlSystemGetDriverVersion())
            return tuple(_read(*each) for each in enumerate(handles)), driver
    except pynvml.NVMLError as error:
        raise ConfigError(f"the memory of the GPUs {', '.join(names)} cannot be read: {error}") from error


@contextmanager
def _nvml(names: list[str]) -> Iterator[list[Any]]:
    """Start NVML for the block; yields the handles of the GPUs that CUDA finds by these names, in their order.

    Raises ConfigError where the driver does not start, and where CUDA would find other GPUs.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        source = f"{VISIBLE} names" if VISIBLE in os.environ else "this machine has the device files of"
        raise ConfigError(
            f"{source} GPU {', '.join(names)}, and the NVIDIA driver does not start: {error}; "
            f"set {VISIBLE}= (empty) or `device: cpu` for the CPU"
        ) from error
    try:
        there = _accessible()
        if any(is_number(name) for name in names):
            _check_order(there)
        handles = [_handle(there, name) for name in names]
        for at, (handle, name) in enumerate(zip(handles, names, strict=True)):
            if handle in handles[:at]:
                raise ConfigError(f"{VISIBLE} names GPU {name} twice; CUDA sees no GPU then")
            _check_mig(handle, name)
        yield handles
    finally:
        pynvml.nvmlShutdown()


def _accessible() -> list[Any]:
    """Return the handles of the GPUs that CUDA numbers: NVML lists those too that a cgroup denies to this process."""
    import pynvml

    handles = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
        except pynvml.NVMLError as error:
            if getattr(error, "value", None) != pynvml.NVML_ERROR_NO_PERMISSION:
                raise ConfigError(f"GPU {index} cannot be used: {error}") from error
    return handles


def _check_order(there: list[Any]) -> None:
    """Raise ConfigError where the user's numbers may be of other GPUs than NVML's: CUDA counts by speed."""
    import pynvml

    if VISIBLE not in os.environ or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return
    kinds = sorted({_text(pynvml.nvmlDeviceGetName(handle)) for handle in there})
    if len(kinds) > 1:
        raise ConfigError(
            f"{VISIBLE} names GPUs by number, and this machine has different ones ({', '.join(kinds)}), which CUDA "
            "numbers by speed: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or name them by UUID"
        )


def _check_mig(handle: Any, name: str) -> None:
    """Raise ConfigError for a GPU in MIG mode: CUDA would use one of its parts in its place."""
    import pynvml

    if name.startswith("MIG-"):
        return
    try:
        is_on = pynvml.nvmlDeviceGetMigMode(handle)[0] == 1
    except pynvml.NVMLError:  # it has no such mode
        return
    if is_on:
        uuids = _mig_uuids(handle)
        parts = f"name its MIG devices in {VISIBLE}: {', '.join(uuids)}" if uuids else "it has no MIG device"
        raise ConfigError(f"GPU {name} is in MIG mode, where CUDA uses one of its MIG devices: {parts}")


def _mig_uuids(handle: Any) -> list[str]:
    import pynvml

    uuids: list[str] = []
    with suppress(pynvml.NVMLError):  # an unused index
        parts = range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle))
        uuids += (_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, n))) for n in parts)
    return uuids


def _read(number: int, handle: Any) -> VisibleGpu:
    import pynvml

    name = _text(pynvml.nvmlDeviceGetName(handle))
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    except pynvml.NVMLError as error:
        if getattr(error, "value", None) == pynvml.NVML_ERROR_GPU_IS_LOST:
            raise ConfigError(f"GPU {number} ({name}) cannot be used: {error}") from error
        return VisibleGpu(number, name, 0, 0, f"the memory of GPU {number} ({name}) cannot be read: {error}")
    if not memory.total:  # of unified memory, some drivers tell 0
        return VisibleGpu(number, name, 0, 0, f"the memory of GPU {number} ({name}) cannot be read: NVML gives 0 bytes")
    return VisibleGpu(number, name, int(memory.total), int(memory.used))


def _handle(there: list[Any], name: str) -> Any:
    """Return NVML's handle of a GPU as CUDA_VISIBLE_DEVICES names it: by number, UUID or the start of one."""
    import pynvml

    name = name.strip()
    if is_number(name):
        if int(name) >= len(there):
            source = f"{VISIBLE} names" if VISIBLE in os.environ else "there is the device file of"
            raise ConfigError(f"{source} GPU {name}, and the driver has {len(there)} GPUs, numbered from 0")
        return there[int(name)]
    if name.startswith("MIG-"):
        return pynvml.nvmlDeviceGetHandleByUUID(name)
    matching = [handle for handle in there if _text(pynvml.nvmlDeviceGetUUID(handle)).startswith(name)]
    if len(matching) != 1:
        raise ConfigError(f"{VISIBLE} names {name!r}, which matches {len(matching)} GPUs of this machine")
    return matching[0]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
