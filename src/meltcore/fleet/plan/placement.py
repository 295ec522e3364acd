"""Places replicas on neighboring GPUs, in the order of CUDA_VISIBLE_DEVICES. Replicas of a model share no GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.gpus.machine import VISIBLE, gpu_environment, visible_gpus
from meltcore.fleet.plan.first_fit import Place
from meltcore.protocol.step_marks import make_marks_file
from meltcore.settings.config import EngineConfig, EngineSettings, EngineSharing, PriorityClass, SharingSection
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

_THREADS = "OMP_NUM_THREADS"  # of each thread pool of torch


class PlacedFleet(msgspec.Struct, frozen=True):
    """The configuration of a server, with the outcome of its plan. For `serve` there is no plan.

    Args:
        spec: The contents of fleet.yaml, or what the flags of `serve` say. A plan has filled in memory and GPUs.
        places: The place of each replica of a planned model, by name. GPUs are numbered on their node. Engines without
            a place choose their GPUs when they start.
        room_bytes: The bytes that models which take turns share, by device. For a missing device these are the bytes of
            the largest such model.
    """

    spec: FleetSpec
    places: dict[str, tuple[Place, ...]] = {}
    room_bytes: dict[str, int] = {}


class Placement(NamedTuple):
    """The settings of one replica's engine, and variables for the environment of its process."""

    engine: EngineConfig
    environment: dict[str, str]
    node: str = ""  # of a cluster; "": this machine
    gpus: tuple[int, ...] = ()  # that the plan names, numbered among those of the node that may be used
    model: str = ""


def loaded_section(name: str, model: ModelSection) -> ModelSection:
    """Return a model as its engines load it. Settings that only the plan needs are removed.

    Its `shapes` become the checkpoint if it has random weights and no checkpoint. Raises ConfigError if they stand for
    a GGUF file, because no configuration describes the blocks of a GGUF file.
    """
    if model.kind != "engine":
        return model
    # For other tasks it is for the plan alone: the memory of an engine decides how many sentences or clips run.
    max_num_seqs = model.max_num_seqs if model.has_context else None
    checkpoint = model.model
    if model.load_format == "dummy" and model.shapes is not None and not Path(checkpoint).expanduser().exists():
        if model.format in ("q4_0", "q8_0"):
            raise ConfigError(
                f"models.{name}: random weights in {model.format} need a GGUF file for their layout, and {checkpoint} "
                f"is not on this machine; name a file, or remove format for dense weights of {model.shapes}"
            )
        checkpoint = model.shapes
    return msgspec.structs.replace(model, checkpoint=checkpoint, shapes=None, format="auto", max_num_seqs=max_num_seqs)


def engine_config(model: ModelSection) -> EngineConfig:
    """Return the settings of a model's engines. They are the same for all replicas, which get their GPUs separately."""
    return EngineConfig(
        model=model.model,
        device=model.device if isinstance(model.device, str) else "cuda",
        memory_bytes=model.memory,
        enable_sleep_mode=model.is_sleepable and model.tensor_parallel_size == 1,
        **{field: getattr(model, field) for field in EngineSettings.__struct_fields__},
    )


def place_replicas(fleet: PlacedFleet, name: str) -> list[Placement]:
    """Return one placement per replica. A single replica chooses its own GPUs, and a CPU is not divided.

    Raises ConfigError if there are too few GPUs, or if CUDA_VISIBLE_DEVICES is invalid.
    """
    model = fleet.spec.models[name]
    engine, replicas, gpus_per_replica = engine_config(model), model.replicas, model.tensor_parallel_size
    places = fleet.places.get(name, ())
    if any(place.node for place in places):
        return [Placement(engine, {}, place.node, place.gpus, name) for place in places]
    if not isinstance(model.device, str):
        return _on_named_gpus(name, model, engine)
    unplaced = Placement(engine, {}, model=name)
    if replicas == 1:
        if engine.device == "auto":
            visible_gpus()  # raises for a GPU that cannot be counted, before the engine starts
        return [unplaced]
    gpus = [] if engine.device == "cpu" else visible_gpus()
    if not gpus and engine.device != "cuda":
        return [unplaced] * replicas
    if len(gpus) < replicas * gpus_per_replica:
        raise ConfigError(
            f"--data-parallel-size {replicas} needs {replicas * gpus_per_replica} GPUs ({gpus_per_replica} each); "
            f"{len(gpus)} are visible"
        )
    # By name: an engine left to choose would silently use the CPU when its GPU cannot be used.
    on_gpus = unplaced._replace(engine=msgspec.structs.replace(engine, device="cuda"))
    first_gpus = range(0, replicas * gpus_per_replica, gpus_per_replica)
    return [
        on_gpus._replace(environment=gpu_environment(gpus[first : first + gpus_per_replica])) for first in first_gpus
    ]


def _on_named_gpus(name: str, model: ModelSection, engine: EngineConfig) -> list[Placement]:
    """Return one placement per replica on the GPUs that the model names. Raises ConfigError if a GPU is not visible."""
    gpus, placements = visible_gpus(), []
    for numbers in model.replica_gpus:
        missing = [number for number in numbers if number >= len(gpus)]
        if missing:
            raise ConfigError(f"models.{name}.device: got GPU {missing[0]}; {len(gpus)} are visible, numbered from 0")
        environment = gpu_environment([gpus[number] for number in numbers])
        placements.append(Placement(engine, environment, gpus=numbers, model=name))
    return placements


def _may_use_gpus(model: ModelSection) -> bool:
    """Return whether the engines of a model run on GPUs of this machine."""
    return not isinstance(model.device, str) or (model.device != "cpu" and bool(visible_gpus()))


def cpu_environment(spec: FleetSpec, placement: Placement) -> dict[str, str]:
    """Return the environment variable that limits the threads of an engine on the CPU.

    The engine shares the cores with the other engines on the CPU. Of models that take turns, only as many engines count
    as can be awake together. Returns no variable for an engine on a GPU, or if the server's environment already sets
    the number.
    """
    if placed_gpus(placement) or _THREADS in os.environ:
        return {}
    on_cpu = {name: model for name, model in spec.engines.items() if not _may_use_gpus(model)}
    resident = sum(model.replicas for model in on_cpu.values() if not model.is_sleepable)
    in_turns = {name: model for name, model in on_cpu.items() if model.is_sleepable}
    num_engines = max(1, resident + _most_awake(in_turns, placement.model))
    return {_THREADS: str(max(1, len(os.sched_getaffinity(0)) // num_engines))}


def _most_awake(models: Mapping[str, ModelSection], member: str) -> int:
    """Return how many engines on the CPU, of models that take turns, can be awake together with `member`.

    The models share memory of the size of the largest one. A model of unknown size is awake alone. A member that is
    always on takes no turns.
    """
    sizes = {name: (model.memory or 0) * model.replicas for name, model in models.items()}
    room, awake = max(sizes.values(), default=0), 0
    if member in models:
        awake = models[member].replicas
        room = room - sizes[member] if sizes[member] else 0
    for name in sorted(sizes, key=sizes.__getitem__):  # the smallest first: as many as can be
        if 0 < sizes[name] <= room and name != member:
            awake, room = awake + models[name].replicas, room - sizes[name]
    return awake if member in models else max([awake, *(model.replicas for model in models.values())])


def gpu_ranks(fleet: PlacedFleet, node: str) -> int:
    """Return the number of ranks of all engines on the GPUs of a node, where "" is this machine.

    An engine on one GPU has one rank.
    """
    count = 0
    for name, model in fleet.spec.engines.items():
        places = fleet.places.get(name, ())
        if any(place.node for place in places):
            replicas = sum(place.node == node and bool(place.gpus) for place in places)
        else:
            replicas = model.replicas if not node and _may_use_gpus(model) else 0
        count += replicas * model.tensor_parallel_size
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
    """Return the settings of a placed engine, with the files by which it shares each of its GPUs with other engines.

    The files are created in `folder`, one per GPU. All engines on the CPU of a machine share one file.
    """
    if sharing.means == "none":
        return placement.engine
    marks = tuple(folder / f"marks-{gpu.replace('/', '-')}" for gpu in sorted(placed_gpus(placement)) or ["cpu"])
    for path in marks:
        make_marks_file(path)
    section = msgspec.structs.asdict(sharing)
    own = EngineSharing(**section, priority_class=priority_class, marks=tuple(map(str, marks)))
    return msgspec.structs.replace(placement.engine, sharing=own)
