"""Describes the GPUs and host memory of one machine that a fleet may use. Each node of a cluster reports them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.common.options import is_number
from meltcore.common.process import call_with_timeout

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_ORDER = "CUDA_DEVICE_ORDER"
_DEVICE_FILES = "nvidia[0-9]*"  # one per GPU; to count them takes neither torch nor the driver's library
# Files of a driver whose GPUs have none of their own: of WSL2 (dxg), of Jetson (nvhost, nvgpu, nvmap), of a container
# that was given a part of them.
_DRIVER_FILES = ("dxg", "nvidia*", "nvhost*", "nvgpu*", "nvmap")
_NO_GPU = ("", "nodevfiles", "none", "void")  # what launchers set for no GPU


class VisibleGpu(NamedTuple):
    """A GPU and its number among the visible GPUs. `used_bytes` is the memory of all processes and the driver together.

    `problem` says why NVML reports no memory, for example because the GPU shares the host's memory. The byte counts are
    then 0.
    """

    number: int
    name: str
    total_bytes: int
    used_bytes: int
    problem: str = ""

    def with_known_size(self, limit_bytes: int) -> VisibleGpu:
        """Return this GPU with its size.

        If the driver reports no memory, the size is `limit_bytes`, which a fleet may use. Raises ConfigError if
        `limit_bytes` is 0 too.
        """
        if self.problem and not limit_bytes:
            example = f"gpus: [{{id: {self.number}, memory: ...}}]"
            raise ConfigError(f"{self.problem}; name what the fleet may use of it as {example}")
        return self._replace(total_bytes=limit_bytes) if self.problem else self


class Machine(NamedTuple):
    """The resources that a fleet may use: GPUs, bytes of host memory, and the driver's version ("" without a driver).

    `problem` says why some GPUs may be unusable. Then only models on the CPU can be planned.
    """

    gpus: tuple[VisibleGpu, ...]
    driver: str
    host_bytes: int
    problem: str = ""

    def checked(self) -> Machine:
        """Return this object if it has no problem. Otherwise raise ConfigError."""
        if self.problem:
            raise ConfigError(self.problem)
        return self


def named_gpus(value: str) -> list[str]:
    """Return the numbers or UUIDs of GPUs in a value of CUDA_VISIBLE_DEVICES. An empty or negative entry ends the list.

    CUDA ends the list there too. Raises ConfigError for a word that names no GPU.
    """
    names: list[str] = []
    for name in map(str.strip, value.split(",")):
        if name.lower() in _NO_GPU or name.startswith("-"):
            break
        if not is_number(name) and not name.startswith(("GPU-", "MIG-")):
            effect = "names GPUs, and" if names else "hides every GPU:"
            raise ConfigError(
                f"{VISIBLE}={value!r} {effect} {name!r} is neither a number nor a UUID; leave it empty for the CPU"
            )
        names.append(name)
    return names


def check_order(gpu_names: Iterable[str], environment: Mapping[str, str]) -> None:
    """Raise ConfigError if CUDA may number the GPUs in another order than NVML. CUDA puts the fastest GPU first.

    `gpu_names` are the product names of all GPUs of the machine.
    """
    gpu_types = sorted(set(gpu_names))
    if len(gpu_types) > 1 and VISIBLE in environment and environment.get(_DEVICE_ORDER) != "PCI_BUS_ID":
        raise ConfigError(
            f"{VISIBLE} names GPUs by number, and this machine has different ones ({', '.join(gpu_types)}), which CUDA "
            f"numbers by speed: set {_DEVICE_ORDER}=PCI_BUS_ID, or name them by UUID"
        )


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """Return the numbers or UUIDs of the GPUs in CUDA_VISIBLE_DEVICES. Without the variable, return all GPUs' numbers.

    `devices` is the folder of device files, by which GPUs are counted. Raises ConfigError if the variable contains a
    word that names no GPU, or if GPUs may exist that cannot be counted.
    """
    value = os.environ.get(VISIBLE)
    if value is not None:
        return named_gpus(value)
    count = len(list(devices.glob(_DEVICE_FILES)))
    if not count:
        driver_file = next((path for pattern in _DRIVER_FILES for path in sorted(devices.glob(pattern))), None)
        count = 0 if driver_file is None else _count_driver_gpus(driver_file)
    return [str(gpu_index) for gpu_index in range(count)]


@cache
def _count_driver_gpus(driver_file: Path) -> int:
    """Return the number of GPUs that the driver with this file reports. Raises ConfigError if it reports no number."""
    from pynvml import NVMLError

    from meltcore.common.gpus.driver import START_LIMIT_S, DriverStartError, Nvml

    def count() -> int:
        with closing(Nvml()) as nvml:
            return nvml.count()

    try:
        return call_with_timeout(START_LIMIT_S, count)
    except (DriverStartError, NVMLError, TimeoutError) as error:
        reason = error.__cause__ if isinstance(error, DriverStartError) else error
        raise ConfigError(
            f"this machine has {driver_file} of a GPU's driver, and its GPUs cannot be counted: {reason}; "
            f"set {VISIBLE} to their numbers, or to nothing (or `device: cpu`, --device cpu) for the CPU"
        ) from error


def gpu_environment(names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables with which CUDA sees only these GPUs. `names` are NVML's numbers, or UUIDs.

    One of the variables sets CUDA's order of GPUs to NVML's order along the PCI bus. By default the fastest GPU comes
    first in CUDA.
    """
    return {VISIBLE: ",".join(names), _DEVICE_ORDER: "PCI_BUS_ID"}
