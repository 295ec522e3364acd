"""Which GPUs each replica of a server has: neighbours in the order of CUDA_VISIBLE_DEVICES, none shared."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import NamedTuple

from meltcore.config import EngineConfig, ServerConfig
from meltcore.errors import ConfigError

_VISIBLE = "CUDA_VISIBLE_DEVICES"
MOST_REPLICAS = 64  # on a CPU nothing else would stop a slip of the hand from starting thousands of processes
_DEVICE_FILES = "nvidia[0-9]*"  # one a GPU; counting them needs neither torch nor the driver's library


class Place(NamedTuple):
    """What one replica's engine is told, and what its environment has beside ours."""

    engine: EngineConfig
    environment: dict[str, str]


def place_replicas(config: ServerConfig) -> list[Place]:
    """A place for each replica. One alone finds its GPUs by itself, and on a CPU there is nothing to share out.

    Raises ConfigError for more than MOST_REPLICAS, where there are too few GPUs, or --device names a single one for
    several replicas.
    """
    engine, replicas, gpus_each = config.engine, config.dp, config.engine.tp
    if replicas == 1:
        return [Place(engine, {})]
    if replicas > MOST_REPLICAS:
        raise ConfigError(f"--dp must be at most {MOST_REPLICAS}; got {replicas}")
    if engine.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(
            f"--device {engine.device} is one GPU, and --dp {replicas} wants one or more for each replica"
        )
    gpus = [] if engine.device == "cpu" else visible_gpus()
    if not gpus and engine.device != "cuda":
        return [Place(engine, {})] * replicas
    if len(gpus) < replicas * gpus_each:
        raise ConfigError(
            f"--dp {replicas} wants {replicas * gpus_each} GPUs ({gpus_each} a replica); {len(gpus)} are visible"
        )
    # By name: an engine left to choose would quietly take the CPU where its GPU cannot be used.
    on_gpus = dataclasses.replace(engine, device="cuda")
    firsts = range(0, replicas * gpus_each, gpus_each)
    return [Place(on_gpus, {_VISIBLE: ",".join(gpus[first : first + gpus_each])}) for first in firsts]


def visible_gpus(devices: Path = Path("/dev")) -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them: what it lists, else every GPU of the machine by its number."""
    listed = os.environ.get(_VISIBLE)
    if listed is not None:
        return [name for name in listed.split(",") if name]
    return [str(at) for at in range(len(list(devices.glob(_DEVICE_FILES))))]
