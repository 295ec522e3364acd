"""Places replicas on neighboring GPUs, in the order of CUDA_VISIBLE_DEVICES. Replicas of a model share no GPU."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import VISIBLE, gpu_environment, visible_gpus
from meltcore.protocol.step_marks import make_marks_file
from meltcore.settings.config import EngineConfig, EngineSharing, PriorityClass, SharingSection
from meltcore.settings.server_config import ModelConfig, ServerConfig

_THREADS = "OMP_NUM_THREADS"  # of each thread pool of torch
_DEVICE = re.compile(r"auto|cpu|cuda(?::[0-9]+)?")
MAX_REPLICAS = 64  # on a CPU nothing else keeps a typing error from starting thousands of processes


class Placement(NamedTuple):
    """The settings of one replica's engine, and the variables that are added to its environment."""

    engine: EngineConfig
    environment: dict[str, str]
    node: str = ""  # of a cluster; "": this machine
    gpus: tuple[int, ...] = ()  # that the plan names, numbered among those of the node that may be used
    model: str = ""  # of a cluster


def place_replicas(config: ModelConfig) -> list[Placement]:
    """Return a placement for each replica. A single replica finds its GPUs by itself, and a CPU is not divided.

    Raises ConfigError for an unknown form of `device`, for more replicas than MAX_REPLICAS, and for too few GPUs.
    Raises ConfigError also if --device names a single GPU for several replicas, and as `visible_gpus` does.
    """
    engine, replicas, gpus_per_replica = config.engine, config.data_parallel_size, config.engine.tensor_parallel_size
    if not _DEVICE.fullmatch(engine.device):
        raise ConfigError(f"--device {engine.device}: must be auto, cpu, cuda or cuda:N")
    if config.replica_nodes:
        return _on_nodes(config)
    if config.replica_gpus:
        return _on_named_gpus(config)
    if replicas == 1:
        if engine.device == "auto":
            visible_gpus()  # raises for a GPU that cannot be counted, before the engine starts
        return [Placement(engine, {})]
    option = f"--data-parallel-size {replicas}"
    if replicas > MAX_REPLICAS:
        raise ConfigError(f"--data-parallel-size must be at most {MAX_REPLICAS}; got {replicas}")
    if engine.device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {engine.device} is one GPU, and {option} needs one or more for each replica")
    gpus = [] if engine.device == "cpu" else visible_gpus()
    if not gpus and engine.device != "cuda":
        return [Placement(engine, {})] * replicas
    if len(gpus) < replicas * gpus_per_replica:
        raise ConfigError(
            f"{option} needs {replicas * gpus_per_replica} GPUs ({gpus_per_replica} each); {len(gpus)} are visible"
        )
    # By name: an engine left to choose would silently use the CPU when its GPU cannot be used.
    on_gpus = msgspec.structs.replace(engine, device="cuda")
    first_gpus = range(0, replicas * gpus_per_replica, gpus_per_replica)
    return [Placement(on_gpus, gpu_environment(gpus[first : first + gpus_per_replica])) for first in first_gpus]


def _on_nodes(config: ModelConfig) -> list[Placement]:
    """Return the placements of a model on the nodes of a cluster. A replica on the CPU has no GPUs."""
    gpus = config.replica_gpus or ((),) * len(config.replica_nodes)
    engine = msgspec.structs.replace(config.engine, device="cuda" if config.replica_gpus else "cpu")
    name = config.names[0]
    placed = zip(config.replica_nodes, gpus, strict=True)
    return [Placement(engine, {}, node, numbers, name) for node, numbers in placed]


def _on_named_gpus(config: ModelConfig) -> list[Placement]:
    """Return the placements of a fleet's model whose GPUs are named. Raises ConfigError if a GPU is not visible."""
    gpus, placements = visible_gpus(), []
    for numbers in config.replica_gpus:
        missing = [number for number in numbers if number >= len(gpus)]
        if missing:
            raise ConfigError(
                f"models.{config.names[0]}.device: got GPU {missing[0]}; {len(gpus)} are visible, numbered from 0"
            )
        environment = gpu_environment([gpus[number] for number in numbers])
        placements.append(Placement(msgspec.structs.replace(config.engine, device="cuda"), environment, gpus=numbers))
    return placements


def cpu_environment(config: ServerConfig, placement: Placement) -> dict[str, str]:
    """Return the environment variable that limits the threads of an engine on the CPU.

    The engine shares the cores with the other engines on the CPU. Of models that take turns, only as many engines count
    as can be awake together. Returns no variable for an engine on a GPU, or if the server's environment already sets
    the number.
    """
    if placed_gpus(placement) or _THREADS in os.environ:
        return {}
    on_cpu = [
        model
        for model in config.models
        if not model.replica_gpus and (model.engine.device == "cpu" or not visible_gpus())
    ]
    resident = sum(model.data_parallel_size for model in on_cpu if not model.sleepable)
    in_turns = [model for model in on_cpu if model.sleepable]
    own = msgspec.structs.replace(placement.engine, sharing=None)
    member = next((each for each in in_turns if msgspec.structs.replace(each.engine, sharing=None) == own), None)
    num_engines = max(1, resident + _most_awake(in_turns, member))
    return {_THREADS: str(max(1, len(os.sched_getaffinity(0)) // num_engines))}


def _most_awake(models: Sequence[ModelConfig], member: ModelConfig | None) -> int:
    """Return how many engines of models that take turns on the CPU can be awake together, including `member`.

    The models share memory of the size of the largest one. A model of unknown size is awake alone.
    """
    sizes = [(model.engine.memory_bytes or 0) * model.data_parallel_size for model in models]
    room, awake = max(sizes, default=0), 0
    if member is not None:
        awake = member.data_parallel_size
        room = 0 if member.engine.memory_bytes is None else room - member.engine.memory_bytes * awake
    # The smallest first: as many as can be.
    for size, model in sorted(zip(sizes, models, strict=True), key=lambda each: each[0]):
        if size > 0 and model is not member and size <= room:
            awake, room = awake + model.data_parallel_size, room - size
    return awake if member is not None else max([awake, *(model.data_parallel_size for model in models)])


def gpu_ranks(config: ServerConfig, node: str) -> int:
    """Return the number of ranks of all engines on the GPUs of a node, where "" is this machine.

    An engine on one GPU has one rank.
    """
    count = 0
    for model in config.models:
        if model.replica_nodes:
            replicas = model.replica_nodes.count(node) if model.replica_gpus else 0
        elif not node and (model.replica_gpus or (model.engine.device != "cpu" and visible_gpus())):
            replicas = model.data_parallel_size
        else:
            continue
        count += replicas * model.engine.tensor_parallel_size
    return count


def placed_gpus(placement: Placement) -> frozenset[str]:
    """Return the GPUs of a placed engine by their names in CUDA_VISIBLE_DEVICES.

    Returns no GPUs for an engine on the CPU. In a cluster the name of the node comes before each name.
    """
    engine = placement.engine
    if placement.node:
        return frozenset(f"{placement.node}:{number}" for number in placement.gpus)
    if engine.device == "cpu":
        return frozenset()
    own_gpus = placement.environment.get(VISIBLE)
    gpus = visible_gpus() if own_gpus is None else own_gpus.split(",")
    first = int(engine.device.partition(":")[2] or 0)
    return frozenset(gpus[first : first + engine.tensor_parallel_size])


def shared_engine(
    placement: Placement, sharing: SharingSection, priority_class: PriorityClass, folder: Path
) -> EngineConfig:
    """Return the settings of a placed engine with the mark files of its GPUs, which are created in `folder`.

    All engines on the CPU of a machine share one file.
    """
    if sharing.means == "none":
        return placement.engine
    marks = tuple(folder / f"marks-{gpu.replace('/', '-')}" for gpu in sorted(placed_gpus(placement)) or ["cpu"])
    for path in marks:
        make_marks_file(path)
    section = msgspec.structs.asdict(sharing)
    own = EngineSharing(**section, priority_class=priority_class, marks=tuple(map(str, marks)))
    return msgspec.structs.replace(placement.engine, sharing=own)
