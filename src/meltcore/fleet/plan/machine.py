"""Reads what a fleet may use on this machine: GPUs and their memory from NVML, host memory, and checkpoints.

This module does not import torch, because a plan must not create a CUDA context.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pynvml import NVML_ERROR_TIMEOUT, NVMLError

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.driver import START_LIMIT_S, UNUSABLE, DriverStartError, GpuLostError, Nvml, NvmlWithTimeout
from meltcore.common.gpus.machine import VISIBLE, Machine, VisibleGpu, check_order, visible_gpus
from meltcore.common.host_memory import host_available_bytes
from meltcore.common.options import is_number
from meltcore.common.process import call_with_timeout

_HUB_LIMIT_S = 15.0  # for all checkpoints together: half of what a node of a cluster has for its answer


def read_machine() -> Machine:
    """Return the visible GPUs and the available host memory.

    If the machine has GPUs that cannot be used, return no GPUs and the reason.
    """
    try:
        gpus, driver = read_gpus()
    except ConfigError as error:
        return Machine((), "", host_available_bytes(), str(error))
    return Machine(gpus, driver, host_available_bytes())


def read_gpus() -> tuple[tuple[VisibleGpu, ...], str]:
    """Return the visible GPUs and the driver's version. Returns no GPUs and "" on a machine without a GPU.

    Raises ConfigError if NVML fails or hangs. Raises ConfigError also if CUDA_VISIBLE_DEVICES does not name GPUs of
    this machine as CUDA would find them.
    """
    names = visible_gpus()
    if not names:
        return (), ""
    try:
        return call_with_timeout(START_LIMIT_S, lambda: _query(names))
    except TimeoutError as error:
        raise ConfigError(f"the memory of the GPUs cannot be read: NVML gave {error}") from error


def unloadable(checkpoints: Iterable[str]) -> dict[str, str]:
    """Return the checkpoints (absolute paths and hub ids) that this machine cannot load, each with the reason."""
    from meltcore.models.checkpoints.hub import hub_problems

    asked = list(checkpoints)
    paths = {path: "" if Path(path).exists() else "it is not there" for path in asked if path.startswith("/")}
    found = paths | hub_problems((model for model in asked if model not in paths), _HUB_LIMIT_S)
    return {checkpoint: problem for checkpoint, problem in found.items() if problem}


def process_bytes() -> dict[int, int]:
    """Return the bytes that each process has on all visible GPUs together, as NVML reports them, by process id.

    In a container NVML may report the process ids of the host, or no processes. Raises ConfigError if NVML fails or
    hangs.
    """
    names = visible_gpus()
    if not names:
        return {}
    try:
        return call_with_timeout(START_LIMIT_S, lambda: _query_processes(names))
    except TimeoutError as error:
        raise ConfigError(f"the processes of the GPUs cannot be read: NVML gave {error}") from error


def bus_ids() -> dict[str, str]:
    """Return the PCI bus ids of the visible GPUs, by their names in CUDA_VISIBLE_DEVICES.

    A GPU for which NVML has no bus id is left out. Raises ConfigError if NVML fails or hangs.
    """
    names = visible_gpus()
    if not names:
        return {}
    try:
        return call_with_timeout(START_LIMIT_S, lambda: _query_bus_ids(names))
    except (NVMLError, TimeoutError) as error:
        raise ConfigError(f"the PCI bus ids of the GPUs cannot be read: NVML gave {error}") from error


def _query_bus_ids(names: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    with _visible_devices(names) as (nvml, devices):
        for name, device in zip(names, devices, strict=True):
            with suppress(NVMLError):
                found[name] = nvml.bus_id(device)
    return found


def _query_processes(names: list[str]) -> dict[int, int]:
    found: Counter[int] = Counter()
    try:
        with _visible_devices(names) as (nvml, devices):
            for device in devices:
                found.update(nvml.process_bytes(device))
    except NVMLError as error:
        raise ConfigError(f"the processes of the GPUs {', '.join(names)} cannot be read: {error}") from error
    return dict(found)


def _query(names: list[str]) -> tuple[tuple[VisibleGpu, ...], str]:
    try:
        with _visible_devices(names) as (nvml, devices):
            return tuple(_read(nvml, *each) for each in enumerate(devices)), nvml.driver()
    except NVMLError as error:
        raise ConfigError(f"the memory of the GPUs {', '.join(names)} cannot be read: {error}") from error


@contextmanager
def _visible_devices(names: list[str]) -> Iterator[tuple[Nvml, list[Any]]]:
    """Run NVML during the block. Yields NVML and the handles of the GPUs that CUDA finds by these names, in order.

    Raises ConfigError if the driver does not start, or if CUDA would find other GPUs.
    """
    try:
        nvml = NvmlWithTimeout(Nvml())
    except DriverStartError as error:
        source = f"{VISIBLE} names" if VISIBLE in os.environ else "this machine has the device files of"
        raise ConfigError(
            f"{source} GPU {', '.join(names)}, and the NVIDIA driver does not start: {error.__cause__}; "
            f"set {VISIBLE}= (empty) or `device: cpu` for the CPU"
        ) from error
    with closing(nvml):
        try:
            all_handles = nvml.gpus()
        except (GpuLostError, NVMLError) as error:
            raise ConfigError(f"the GPUs cannot be listed: {error}") from error
        if any(is_number(name) for name in names):
            check_order(map(nvml.name, all_handles), os.environ)
        handles = [_handle(nvml, all_handles, name) for name in names]
        for at, (handle, name) in enumerate(zip(handles, names, strict=True)):
            if handle in handles[:at]:
                raise ConfigError(f"{VISIBLE} names GPU {name} twice; CUDA sees no GPU then")
            _check_mig(nvml, handle, name)
        yield nvml, handles


def _check_mig(nvml: Nvml, handle: Any, name: str) -> None:
    """Raise ConfigError for a GPU in MIG mode, because CUDA would use one MIG device instead of the whole GPU."""
    if name.startswith("MIG-"):
        return
    try:
        is_on = nvml.mig_mode(handle) == 1
    except NVMLError:  # it has no such mode
        return
    if is_on:
        uuids = _mig_uuids(nvml, handle)
        parts = f"name its MIG devices in {VISIBLE}: {', '.join(uuids)}" if uuids else "it has no MIG device"
        raise ConfigError(f"GPU {name} is in MIG mode, where CUDA uses one of its MIG devices: {parts}")


def _mig_uuids(nvml: Nvml, handle: Any) -> list[str]:
    """Return the UUIDs of a GPU's MIG devices. One that is being destroyed is left out."""
    uuids, parts = list[str](), list[Any]()
    with suppress(NVMLError):
        parts = nvml.mig_devices(handle)
    for part in parts:
        with suppress(NVMLError):
            uuids.append(nvml.uuid(part))
    return uuids


def _read(nvml: Nvml, number: int, handle: Any) -> VisibleGpu:
    try:
        name = nvml.name(handle)
    except NVMLError as error:
        raise ConfigError(f"GPU {number} cannot be used: {error}") from error
    try:
        used_bytes, total_bytes = nvml.memory_bytes(handle)
    except NVMLError as error:
        if getattr(error, "value", None) in (*UNUSABLE, NVML_ERROR_TIMEOUT):
            raise ConfigError(f"GPU {number} ({name}) cannot be used: {error}") from error
        return VisibleGpu(number, name, 0, 0, f"the memory of GPU {number} ({name}) cannot be read: {error}")
    if not total_bytes:  # of unified memory, some drivers tell 0
        return VisibleGpu(number, name, 0, 0, f"the memory of GPU {number} ({name}) cannot be read: NVML gives 0 bytes")
    return VisibleGpu(number, name, total_bytes, used_bytes)


def _handle(nvml: Nvml, all_handles: list[Any], name: str) -> Any:
    """Return NVML's handle of a GPU that CUDA_VISIBLE_DEVICES names.

    The name is a number, a UUID, or the beginning of a UUID.
    """
    name = name.strip()
    if is_number(name):
        if int(name) >= len(all_handles):
            source = f"{VISIBLE} names" if VISIBLE in os.environ else "there is the device file of"
            raise ConfigError(f"{source} GPU {name}, and the driver has {len(all_handles)} GPUs, numbered from 0")
        return all_handles[int(name)]
    if name.startswith("MIG-"):
        return nvml.device_by_uuid(name)
    matching = [handle for handle in all_handles if nvml.uuid(handle).startswith(name)]
    if len(matching) != 1:
        raise ConfigError(f"{VISIBLE} names {name!r}, which matches {len(matching)} GPUs of this machine")
    return matching[0]
