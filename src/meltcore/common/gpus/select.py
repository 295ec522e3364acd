"""Selects GPUs: all GPUs, the GPUs that the user names, or the GPUs of CUDA_VISIBLE_DEVICES."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from pynvml import NVML_ERROR_TIMEOUT, NVMLError

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.gpus.driver import Nvml
from meltcore.common.gpus.gpu_types import GpuType
from meltcore.common.gpus.machine import VISIBLE, check_order, named_gpus
from meltcore.common.gpus.metrics import UNKNOWN
from meltcore.common.options import is_number


class GpuInfo(msgspec.Struct, kw_only=True, frozen=True):
    """Identifies a GPU or a MIG device. `index` is the index of the GPU in nvidia-smi.

    Of a GPU about which the driver does not answer in time, the name is UNKNOWN.
    """

    index: int
    name: str
    uuid: str
    architecture: int | None
    mig: bool = False

    @property
    def gpu_type(self) -> GpuType:
        """The type of the GPU, in the form in which the table of GPU types lists it."""
        return GpuType(self.name, self.architecture, self.mig)

    @property
    def answers(self) -> bool:
        """Whether the driver answered when it was asked for the name."""
        return self.name != UNKNOWN

    @property
    def label(self) -> str:
        """A short name for tables, such as "GPU 3". The name of a MIG device has the beginning of its UUID."""
        return f"GPU {self.index}" + (f" {self.uuid[:12]}" if self.mig else "")


@dataclass(frozen=True)
class GpuDevice:
    """A selected GPU or MIG device.

    `device` is NVML's handle of the whole GPU, from which most values are read. `handle` is NVML's handle of the
    selected device itself. A MIG device has only memory and GPM counters of its own.
    """

    info: GpuInfo
    device: Any
    handle: Any
    gpu_instance: int | None = None


def select_gpus(
    nvml: Nvml, requested: str | None, environment: Mapping[str, str] = os.environ, *, split_mig: bool = False
) -> list[GpuDevice]:
    """Return the GPUs of `requested`, else of CUDA_VISIBLE_DEVICES, else all GPUs.

    Each GPU occurs once, in the given order.

    `requested` is the value of `--gpu`: comma-separated nvidia-smi indices, UUIDs or UUID prefixes, MIG UUIDs, or
    MIG-GPU-UUID/GPU instance/compute instance (the form of older drivers). With `split_mig`, MIG devices replace a GPU
    in MIG mode, since programs can only run on them. A GPU that does not answer in time hinders no other. Raises
    ConfigError if a name matches no GPU or several, or if no GPU is left.
    """
    selected = _select(nvml, requested, environment)
    if split_mig:
        selected = [part for gpu in selected for part in ([gpu] if gpu.info.mig else _mig_devices(nvml, gpu) or [gpu])]
    return list({gpu.info.uuid: gpu for gpu in selected}.values())


def _select(nvml: Nvml, requested: str | None, environment: Mapping[str, str]) -> list[GpuDevice]:
    gpus = [_gpu_device(nvml, index, handle) for index, handle in enumerate(nvml.gpus())]
    if not gpus:
        raise ConfigError("the NVIDIA driver sees no GPU")
    if requested is not None:
        return _select_by_names(nvml, gpus, requested.split(","), "--gpu")
    visible = environment.get(VISIBLE)
    if visible is None:
        return gpus
    names = named_gpus(visible)
    if not names:
        raise ConfigError(f"{VISIBLE}={visible!r} hides every GPU; unset it, or select GPUs with --gpu")
    if any(is_number(name) for name in names):
        check_order((gpu.info.name for gpu in gpus if gpu.info.answers), environment)
    return _select_by_names(nvml, gpus, names, VISIBLE)


def _select_by_names(nvml: Nvml, gpus: list[GpuDevice], names: Sequence[str], source: str) -> list[GpuDevice]:
    mig_devices: list[GpuDevice] | None = None
    selected: list[GpuDevice] = []
    for name in map(str.strip, names):
        if is_number(name):
            if int(name) >= len(gpus):
                raise ConfigError(f"{source} names GPU {name}; there are GPUs 0 to {len(gpus) - 1}")
            selected.append(gpus[int(name)])
        elif name.startswith("MIG-"):
            if mig_devices is None:
                mig_devices = [part for gpu in gpus for part in _mig_devices(nvml, gpu)]
            selected.append(_find_by_instance(nvml, mig_devices, name) or _find_by_uuid(mig_devices, name, source))
        else:
            selected.append(_find_by_uuid(gpus, name, source))
    return selected


def _find_by_uuid(gpus: list[GpuDevice], name: str, source: str) -> GpuDevice:
    """Return the GPU whose UUID begins with `name`. CUDA accepts such prefixes too."""
    if not name:
        raise ConfigError(f"{source} holds an empty name; it takes indices and UUIDs separated by commas")
    matching_gpus = [gpu for gpu in gpus if gpu.info.uuid.startswith(name)]
    if len(matching_gpus) != 1:
        matches = "matches no GPU" if not matching_gpus else f"matches {len(matching_gpus)} GPUs"
        available_ids = ", ".join(
            gpu.info.uuid if gpu.info.mig else f"{gpu.info.index} ({gpu.info.uuid})" for gpu in gpus
        )
        raise ConfigError(f"{source} names {name!r}, which {matches}; there are {available_ids or 'none'}")
    return matching_gpus[0]


def _find_by_instance(nvml: Nvml, mig_devices: Sequence[GpuDevice], name: str) -> GpuDevice | None:
    """Return the MIG device with a name of the form MIG-GPU-UUID/GPU instance/compute instance.

    Returns None if the GPU instance does not exist or has several MIG devices.
    """
    uuid, _, instances = name.removeprefix("MIG-").partition("/")
    instance = instances.partition("/")[0]
    matching_instances = [
        part for part in mig_devices if str(part.gpu_instance) == instance and nvml.uuid(part.device) == uuid
    ]
    return matching_instances[0] if len(matching_instances) == 1 else None


def _gpu_device(nvml: Nvml, index: int, handle: Any) -> GpuDevice:
    try:
        architecture = nvml.architecture(handle)
    except NVMLError:
        architecture = None  # the table of GPU types then uses the name alone
    try:
        name, uuid = nvml.name(handle), nvml.uuid(handle)
    except NVMLError as error:
        if error.value == NVML_ERROR_TIMEOUT:
            return GpuDevice(GpuInfo(index=index, name=UNKNOWN, uuid=f"GPU {index}", architecture=None), handle, handle)
        raise MeltcoreError(f"the driver does not answer about GPU {index}: {error}; look in the kernel log") from error
    info = GpuInfo(index=index, name=name, uuid=uuid, architecture=architecture)
    return GpuDevice(info, handle, handle)


def _mig_devices(nvml: Nvml, gpu: GpuDevice) -> list[GpuDevice]:
    if not gpu.info.answers:
        return []
    return [
        GpuDevice(
            msgspec.structs.replace(gpu.info, name=nvml.name(handle), uuid=nvml.uuid(handle), mig=True),
            gpu.device,
            handle,
            nvml.gpu_instance(handle),
        )
        for handle in nvml.mig_devices(gpu.device)
    ]
