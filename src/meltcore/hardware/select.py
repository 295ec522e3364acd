"""Which GPUs to read: all, those named, or those CUDA_VISIBLE_DEVICES leaves visible."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pynvml import NVMLError

from meltcore.errors import ConfigError
from meltcore.hardware.nvml import Nvml
from meltcore.hardware.recording import GpuInfo

VISIBLE = "CUDA_VISIBLE_DEVICES"
_ORDER = "CUDA_DEVICE_ORDER"


@dataclass(frozen=True)
class Gpu:
    """A GPU to read. Most answers come from the board; a MIG slice has only its own memory and GPM counters."""

    info: GpuInfo
    board: Any
    handle: Any
    gpu_instance: int | None = None


def select_gpus(
    nvml: Nvml, wanted: str | None, environment: Mapping[str, str] = os.environ, *, in_slices: bool = False
) -> list[Gpu]:
    """The GPUs of `wanted`, else of CUDA_VISIBLE_DEVICES, else all boards; each once, in the order named.

    `wanted` is as of `--gpu`: indices as nvidia-smi has them, UUIDs or beginnings of them, MIG UUIDs, between commas;
    MIG slices also as MIG-GPU-UUID/GPU instance/compute instance, as older drivers named them.
    `in_slices`: a board that is divided by MIG stands for its slices, which is what a program can run on.
    Raises ConfigError for a name that no GPU or several have, and where nothing is left to read.
    """
    found = _selected(nvml, wanted, environment)
    if not in_slices:
        return found
    parts = [part for gpu in found for part in ([gpu] if gpu.info.mig else _slices(nvml, gpu) or [gpu])]
    return list({part.info.uuid: part for part in parts}.values())


def _selected(nvml: Nvml, wanted: str | None, environment: Mapping[str, str]) -> list[Gpu]:
    boards = [_board(nvml, index, handle) for index, handle in enumerate(nvml.boards())]
    if not boards:
        raise ConfigError("the NVIDIA driver sees no GPU")
    if wanted is not None:
        return _named(nvml, boards, wanted.split(","), "--gpu")
    visible = environment.get(VISIBLE)
    if visible is None:
        return boards
    names = _before_the_end(visible.split(","))
    if not names:
        raise ConfigError(f"{VISIBLE}={visible!r} hides every GPU; unset it, or name some with --gpu")
    if any(name.isdigit() for name in names):
        _check_order(boards, environment)
    return _named(nvml, boards, names, VISIBLE)


def _before_the_end(names: Sequence[str]) -> list[str]:
    """CUDA stops reading at an empty entry or a negative index."""
    kept: list[str] = []
    for name in map(str.strip, names):
        if not name or name.startswith("-"):
            break
        kept.append(name)
    return kept


def _check_order(boards: list[Gpu], environment: Mapping[str, str]) -> None:
    """CUDA numbers GPUs by speed unless told otherwise; among unlike GPUs its indices are then not NVML's."""
    kinds = {gpu.info.name for gpu in boards}
    if len(kinds) > 1 and environment.get(_ORDER) != "PCI_BUS_ID":
        raise ConfigError(
            f"{VISIBLE} names GPUs by index, and this machine has unlike ones ({', '.join(sorted(kinds))}), which CUDA "
            f"numbers by speed: set {_ORDER}=PCI_BUS_ID, or name them by UUID"
        )


def _named(nvml: Nvml, boards: list[Gpu], names: Sequence[str], source: str) -> list[Gpu]:
    chosen: dict[str, Gpu] = {}
    slices: list[Gpu] | None = None
    for name in map(str.strip, names):
        if name.isdigit():
            if int(name) >= len(boards):
                raise ConfigError(f"{source} names GPU {name}; there are GPUs 0 to {len(boards) - 1}")
            gpu = boards[int(name)]
        elif name.startswith("MIG-"):
            slices = [part for board in boards for part in _slices(nvml, board)] if slices is None else slices
            gpu = _of_instance(nvml, slices, name) or _by_uuid(slices, name, source)
        else:
            gpu = _by_uuid(boards, name, source)
        chosen[gpu.info.uuid] = gpu
    return list(chosen.values())


def _by_uuid(gpus: list[Gpu], name: str, source: str) -> Gpu:
    """The one whose UUID begins so: CUDA takes beginnings too."""
    if not name:
        raise ConfigError(f"{source} holds an empty name; it takes indices and UUIDs with a comma between")
    found = [gpu for gpu in gpus if gpu.info.uuid.startswith(name)]
    if len(found) != 1:
        which = "no GPU has" if not found else f"{len(found)} GPUs have"
        there = ", ".join(gpu.info.uuid if gpu.info.mig else f"{gpu.info.index} ({gpu.info.uuid})" for gpu in gpus)
        raise ConfigError(f"{source} names {name!r}, which {which}; there are {there or 'none'}")
    return found[0]


def _of_instance(nvml: Nvml, slices: Sequence[Gpu], name: str) -> Gpu | None:
    """The slice of MIG-GPU-UUID/GPU instance/compute instance, where its GPU instance is not shared by several."""
    board, _, instances = name.removeprefix("MIG-").partition("/")
    instance = instances.partition("/")[0]
    found = [part for part in slices if str(part.gpu_instance) == instance and nvml.uuid(part.board) == board]
    return found[0] if len(found) == 1 else None


def _board(nvml: Nvml, index: int, handle: Any) -> Gpu:
    try:
        architecture = nvml.architecture(handle)
    except NVMLError:
        architecture = None  # the product table then goes by the name alone
    return Gpu(
        GpuInfo(index=index, name=nvml.name(handle), uuid=nvml.uuid(handle), architecture=architecture), handle, handle
    )


def _slices(nvml: Nvml, board: Gpu) -> list[Gpu]:
    return [
        Gpu(
            GpuInfo(
                index=board.info.index,
                name=nvml.name(handle),
                uuid=nvml.uuid(handle),
                architecture=board.info.architecture,
                mig=True,
            ),
            board.board,
            handle,
            nvml.gpu_instance(handle),
        )
        for handle in nvml.slices(board.board)
    ]
