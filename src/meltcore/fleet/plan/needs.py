"""Computes what the engines of a fleet need: GPU memory, host memory of engines on the CPU, and pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from meltcore.common.errors import ConfigError
from meltcore.engine.memory.memory_needs import (
    PlannedEngine,
    TaskMismatchError,
    UnknownSizesError,
    engine_needs,
    read_model_sizes,
)
from meltcore.fleet.plan.context_memory import ASSUMED, ContextMemory
from meltcore.fleet.plan.first_fit import Host
from meltcore.settings.fleet_checks import model_error
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

# Of the process of an engine on a CPU beside its budget: interpreter, torch and their libraries. Not measured.
HOST_PROCESS_BYTES = 768 * 2**20


def fleet_needs(spec: FleetSpec, known: dict[str, PlannedEngine] | None = None) -> dict[str, PlannedEngine]:
    """Return the memory that each model of Meltcore's own engines needs, by name.

    `known` has the memory of models that was computed before. The memory of new models is added to it. Raises
    ConfigError if the memory of a model cannot be computed.
    """
    known, needs = {} if known is None else known, {}
    for name, model in spec.models.items():
        if model.kind == "engine":
            needs[name] = known_needs(known, name, model)
        elif model.kind == "command" and model.memory is None and model.device != "cpu":
            raise ConfigError(f"models.{name}: a plan needs the memory of a command: name `memory`")
    return needs


def known_needs(known: dict[str, PlannedEngine], name: str, model: ModelSection) -> PlannedEngine:
    """Return the memory that a model's engine needs. It is taken from `known`, or computed and added there.

    To compute it the checkpoint is opened, which may download files from the Hub.
    """
    key = repr(model)  # without its name: models of a fleet are often alike
    if key not in known:
        known[key] = named_needs(name, model)
    return known[key]


def read_fleet_sizes(spec: FleetSpec, report: Callable[[str], None] = lambda _line: None) -> None:
    """Read the sizes of all models in parallel, on their devices and on the CPU.

    The nearest plan may put any model on the CPU. `report` gets lines about checkpoints that take more than a few
    seconds. Each may take `timeouts.start_s`.
    """
    read_model_sizes(spec.engines, spec.timeouts.start_s, report)


def host_needs(spec: FleetSpec, needs: dict[str, PlannedEngine]) -> tuple[int, int]:
    """Return two numbers of bytes: host memory of all engines on the CPU, and pinned memory of weights that sleep.

    Sleepable models take turns.
    """
    sleepable = {name: model for name, model in spec.models.items() if model.residency == "sleepable"}
    pinned = (
        model.replicas * model.tensor_parallel_size * pinned_bytes(spec, needs, name)
        for name, model in sleepable.items()
        if model.device != "cpu"
    )
    on_cpu = tuple(engine for engine in planned_engines(spec, needs, sleepable) if not engine.gpus)
    return Host("", None, on_cpu).engine_bytes, sum(pinned)


def planned_engines(
    spec: FleetSpec,
    needs: dict[str, PlannedEngine],
    sleeping: Collection[str] = (),
    contexts: ContextMemory = ASSUMED,
    excluded_nodes: Mapping[str, frozenset[str]] | None = None,
) -> Iterator[PlannedEngine]:
    """Yield each engine that a plan has to place. Engines of the models in `sleeping` take turns.

    `excluded_nodes` has the nodes that cannot load a model, by model. Commands on a CPU and models at a URL need no
    place.
    """
    for name, model in spec.models.items():
        on_cpu = model.device == "cpu"
        if model.kind == "url" or (on_cpu and name not in needs):
            continue
        size = needs.get(name) or PlannedEngine(model.task, int(model.memory or 0), [], None, 0, "file", asleep_bytes=0)
        ranks, is_asleep, asleep_bytes = model.tensor_parallel_size, name in sleeping, size.asleep_bytes
        resident_bytes = HOST_PROCESS_BYTES if on_cpu else contexts.process_bytes(model.task, ranks)
        if on_cpu:
            asleep_bytes = min(size.budget_bytes, asleep_bytes + pinned_bytes(spec, needs, name))
        elif is_asleep:
            resident_bytes += asleep_bytes
        engine = size._replace(
            asleep_bytes=asleep_bytes,
            model=name,
            gpus=0 if on_cpu else ranks,
            sleeps=is_asleep,
            resident_bytes=resident_bytes,
            excluded_nodes=(excluded_nodes or {}).get(name, frozenset()),
        )
        for replica, only in enumerate(model.replica_gpus):
            yield engine._replace(replica=replica, only=only)


def pinned_bytes(spec: FleetSpec, needs: dict[str, PlannedEngine], name: str) -> int:
    """Return the pinned host memory, in bytes, that an engine of a sleeping model keeps for each of its GPUs.

    The engine keeps its weights in this memory, and on a CPU where they are. The result is 0 if the engine drops its
    weights, or if it has no sleep mode and is ended instead. If only the file states the model's memory, as for a vLLM
    server, the whole memory counts.
    """
    model = spec.models[name]
    if spec.residency.keep != "host":
        return 0
    if name not in needs:
        return int(model.memory or 0) if model.sleep_mode == "vllm" else 0
    if model.tensor_parallel_size > 1:
        return 0
    rows = needs[name].rows
    if not rows:
        return needs[name].budget_bytes
    return sum(row.size_bytes for row in rows if row.name in ("weights", "rounding"))


def named_needs(name: str, model: ModelSection) -> PlannedEngine:
    """Return the memory that a model's engine needs. The text of an error begins with the model's name."""
    try:
        return engine_needs(model, on_cpu=model.device == "cpu")
    except UnknownSizesError as error:
        if model.memory is not None:  # the file knows them
            seqs = model.max_num_seqs or 0
            return PlannedEngine(model.task, int(model.memory), [], model.max_model_len, seqs, "file")
        raise UnknownSizesError(model_error(name, error)) from error
    except TaskMismatchError as error:
        raise TaskMismatchError(f"models.{name}.task: {error}") from error
    except ConfigError as error:
        raise ConfigError(model_error(name, error)) from error
