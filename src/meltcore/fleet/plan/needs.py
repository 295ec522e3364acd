"""Computes what the engines of a fleet need: GPU memory, host memory of engines on the CPU, and pinned host memory."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.engine.memory.memory_needs import (
    EngineNeeds,
    TaskMismatchError,
    UnknownSizesError,
    engine_needs,
    read_model_sizes,
)
from meltcore.settings.fleet_spec import FleetSpec, ModelSection

# Of the process of an engine on a CPU beside its budget: interpreter, torch and their libraries. Not measured.
HOST_PROCESS_BYTES = 768 * 2**20


def fleet_needs(spec: FleetSpec, known: dict[str, EngineNeeds] | None = None) -> dict[str, EngineNeeds]:
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


def known_needs(known: dict[str, EngineNeeds], name: str, model: ModelSection) -> EngineNeeds:
    """Return the memory that a model's engine needs from `known`. For a new model, compute it and add it there.

    To compute it the checkpoint is opened, which may download files from the Hub.
    """
    key = repr(model)  # without its name: models of a fleet are often alike
    if key not in known:
        known[key] = named_needs(name, model)
    return known[key]


def read_fleet_sizes(spec: FleetSpec) -> None:
    """Read the sizes of all models in parallel, on their devices and on the CPU.

    The nearest plan may put any model on the CPU.
    """
    engines = [model for model in spec.models.values() if model.kind == "engine"]
    on_cpu = [msgspec.structs.replace(model, device="cpu", residency="always_on") for model in engines]
    read_model_sizes((model, model.device == "cpu") for model in (*engines, *on_cpu))


def host_needs(spec: FleetSpec, needs: dict[str, EngineNeeds]) -> tuple[int, int]:
    """Return two numbers of bytes: host memory of all engines on the CPU, and pinned memory of weights that sleep."""
    pinned = (
        model.replicas * model.tensor_parallel_size * pinned_bytes(spec, needs, name)
        for name, model in spec.models.items()
        if model.residency == "sleepable" and model.device != "cpu"
    )
    return sum(size for _, _, size in cpu_engines(spec, needs)), sum(pinned)


def cpu_engines(spec: FleetSpec, needs: dict[str, EngineNeeds]) -> Iterator[tuple[str, int, int]]:
    """Yield (model, replica, bytes of host memory) for each engine on the CPU."""
    for name, model in spec.models.items():
        if name in needs and model.device == "cpu":
            for replica in range(model.replicas):
                yield name, replica, HOST_PROCESS_BYTES + needs[name].budget_bytes


def pinned_bytes(spec: FleetSpec, needs: dict[str, EngineNeeds], name: str) -> int:
    """Return the pinned host memory, in bytes, that an engine of a sleeping model keeps for each of its GPUs.

    The engine keeps its weights there. The result is 0 if weights are dropped, and for an engine without a sleep mode,
    which is ended instead. If only the file states the model's memory, as for a vLLM server, the whole memory counts.
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


def named_needs(name: str, model: ModelSection) -> EngineNeeds:
    """Return the memory that a model's engine needs. Errors name the model."""
    try:
        return engine_needs(model, on_cpu=model.device == "cpu")
    except UnknownSizesError as error:
        if model.memory is not None:  # the file knows them
            return EngineNeeds(model.task, int(model.memory), [], model.max_model_len, model.max_num_seqs or 0, "file")
        raise UnknownSizesError(f"models.{name}: {error}") from error
    except TaskMismatchError as error:
        raise TaskMismatchError(f"models.{name}.task: {error}") from error
    except ConfigError as error:
        raise ConfigError(f"models.{name}: {error}") from error
