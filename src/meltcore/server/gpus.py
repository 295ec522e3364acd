"""Which GPUs each replica of a server has: neighbours in the order of CUDA_VISIBLE_DEVICES, none shared."""

from __future__ import annotations

import os
from pathlib import Path

from meltcore.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE_FILES = "nvidia[0-9]*"  # one a GPU; counting them needs neither torch nor the driver's library


def replica_environments(replicas: int, gpus_each: int, device: str) -> list[dict[str, str]]:
    """What to add to the environment of each replica's engine; nothing for one alone, nor on a CPU.

    Raises ConfigError where there are too few GPUs, or `device` names a single one for several replicas.
    """
    if replicas == 1:
        return [{}]
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device} is one GPU, and --dp {replicas} wants one or more for each replica")
    gpus = [] if device == "cpu" else visible_gpus()
    if not gpus and device != "cuda":
        return [{} for _ in range(replicas)]
    if len(gpus) < replicas * gpus_each:
        raise ConfigError(
            f"--dp {replicas} wants {replicas * gpus_each} GPUs ({gpus_each} a replica); {len(gpus)} are visible"
        )
    return [
        {_VISIBLE: ",".join(gpus[first : first + gpus_each])} for first in range(0, replicas * gpus_each, gpus_each)
    ]


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them: what it lists, else every GPU of the machine by its number."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [name for name in listed.split(",") if name]
    return [str(at) for at in range(len(list(devices.glob(_DEVICE_FILES))))]
