"""Has the outcome of a plan, and the settings of engines that follow from it: threads, ranks and GPU sharing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from meltcore.common.gpus.machine import visible_gpus
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
        room_bytes: The bytes that models which take turns share, by GPU. On the CPU, and on other missing devices,
            these are the bytes of the largest such model.
    """

    spec: FleetSpec
    places: dict[str, tuple[Place, ...]] = {}
    room_bytes: dict[str, int] = {}

    def on_nodes(self, name: str) -> tuple[Place, ...]:
        """Return the places of a model's replicas on nodes of a cluster. The result is empty on a single machine."""
        return tuple(place for place in self.places.get(name, ()) if place.node)


def loaded_section(model: ModelSection) -> ModelSection:
    """Return the settings of a model without those that only a plan needs, as its engines load the model.

    The `shapes` become the checkpoint if the model has random weights and its checkpoint is not on this machine.
    """
    if model.kind != "engine":
        return model
    # For other tasks it is for the plan alone: the memory of an engine decides how many sentences or clips run.
    max_num_seqs = model.max_num_seqs if model.has_context else None
    checkpoint = model.model
    if model.load_format == "dummy" and model.shapes is not None and not Path(checkpoint).expanduser().exists():
        checkpoint = model.shapes
    return msgspec.structs.replace(model, checkpoint=checkpoint, shapes=None, format="auto", max_num_seqs=max_num_seqs)


def engine_config(model: ModelSection) -> EngineConfig:
    """Return the settings that all engines of a model share. The GPUs of each replica are not among them."""
    return EngineConfig(
        model=model.model,
        device=model.device if isinstance(model.device, str) else "cuda",
        memory_bytes=model.memory,
        enable_sleep_mode=model.is_sleepable and model.tensor_parallel_size == 1,
        **{field: getattr(model, field) for field in EngineSettings.__struct_fields__},
    )


def _may_use_gpus(model: ModelSection) -> bool:
    """Return whether the engines of a model run on GPUs of this machine."""
    return not isinstance(model.device, str) or (model.device != "cpu" and bool(visible_gpus()))


def cpu_environment(spec: FleetSpec, name: str) -> dict[str, str]:
    """Return the environment variable that limits the threads of a model's engine on the CPU.

    The engine shares the cores with the other engines on the CPU. Of models that take turns, only as many engines count
    as can be awake together.
    """
    on_cpu = {name: model for name, model in spec.engines.items() if not _may_use_gpus(model)}
    resident = sum(model.replicas for model in on_cpu.values() if not model.is_sleepable)
    in_turns = {name: model for name, model in on_cpu.items() if model.is_sleepable}
    num_engines = max(1, resident + _most_awake(in_turns, name))
    return thread_environment(len(os.sched_getaffinity(0)) // num_engines)


def thread_environment(num_threads: int) -> dict[str, str]:
    """Return the environment variable that limits each thread pool of an engine to `num_threads`, but at least one.

    Returns no variable if the server's environment already sets the number.
    """
    return {} if _THREADS in os.environ else {_THREADS: str(max(1, num_threads))}


def _most_awake(models: Mapping[str, ModelSection], member: str) -> int:
    """Return how many engines on the CPU can be awake together with `member`, among models that take turns.

    Together these models have as much memory as the largest of them. A model of unknown size is awake alone. A member
    that is always on takes no turns.
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
        if places := fleet.on_nodes(name):
            replicas = sum(place.node == node and bool(place.gpus) for place in places)
        else:
            replicas = model.replicas if not node and _may_use_gpus(model) else 0
        count += replicas * model.tensor_parallel_size
    return count


def shared_engine(
    engine: EngineConfig, gpus: Iterable[str], sharing: SharingSection, priority_class: PriorityClass, folder: Path
) -> EngineConfig:
    """Return the settings of an engine, with the files by which it shares each of its GPUs with other engines.

    `gpus` are names as in CUDA_VISIBLE_DEVICES. The files are created in `folder`, one per GPU. All engines on the CPU
    of a machine share one file.
    """
    if sharing.means == "none":
        return engine
    marks = tuple(folder / f"marks-{gpu.replace('/', '-')}" for gpu in sorted(gpus) or ["cpu"])
    for path in marks:
        make_marks_file(path)
    section = msgspec.structs.asdict(sharing)
    own = EngineSharing(**section, priority_class=priority_class, marks=tuple(map(str, marks)))
    return msgspec.structs.replace(engine, sharing=own)
