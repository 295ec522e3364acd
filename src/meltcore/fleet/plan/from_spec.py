"""Turns a fleet.yaml into the settings of a server, with a ModelConfig for each model of Meltcore's own engines."""

from __future__ import annotations

from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.settings.config import EngineConfig, EngineSettings
from meltcore.settings.fleet_spec import FleetSpec, ModelSection
from meltcore.settings.server_config import ModelConfig, ServerConfig


def server_config(spec: FleetSpec) -> ServerConfig:
    """Return the settings of a server with all models of the fleet, also the models of upstream servers."""
    return ServerConfig(
        models=tuple(model_config(spec, name) for name, model in spec.models.items() if model.kind == "engine"),
        upstream={name: model for name, model in spec.models.items() if model.kind != "engine"},
        order=tuple(spec.models),
        server=spec.server,
        keys=spec.keys,
        limits=spec.limits,
        timeouts=spec.timeouts,
        languages=spec.languages,
        routes=spec.routes,
        residency=spec.residency,
        sharing=spec.sharing,
    )


def model_config(spec: FleetSpec, name: str) -> ModelConfig:
    """Return the settings of one model of Meltcore's own engines. Raises ConfigError for an upstream model."""
    model = spec.models[name]
    if model.checkpoint is None or model.kind != "engine":
        raise ConfigError(f"models.{name}: a model with a {model.kind} has no engine of ours")
    return ModelConfig(
        engine=engine_config(model, _engine_checkpoint(name, model, model.checkpoint)),
        served_model_name=(name, *model.aliases),
        data_parallel_size=model.replicas,
        replica_gpus=() if isinstance(model.device, str) else tuple(model.replica_gpus),
        limits=spec.limits.of(model),
        generation_config=model.generation_config,
        priority_class=model.priority,
        sleepable=model.residency == "sleepable",
        start_timeout_s=spec.timeouts.start_s,
    )


def _engine_checkpoint(name: str, model: ModelSection, checkpoint: str) -> str:
    """Return what the engines of a model open: its checkpoint, or its `shapes` for random weights without a checkpoint.

    Raises ConfigError if the shapes stand for a GGUF file, because no configuration describes the blocks of a GGUF
    file.
    """
    if model.load_format != "dummy" or model.shapes is None or Path(checkpoint).expanduser().exists():
        return checkpoint
    if model.format in ("q4_0", "q8_0"):
        raise ConfigError(
            f"models.{name}: random weights in {model.format} need a GGUF file for their layout, and {checkpoint} is "
            f"not on this machine; name a file, or remove format for dense weights of {model.shapes}"
        )
    return model.shapes


def engine_config(model: ModelSection, checkpoint: str) -> EngineConfig:
    """Return the settings of a model's engines. They are the same for all replicas, which get their GPUs separately."""
    # For other tasks it is for the plan alone: the memory of an engine decides how many sentences or clips run.
    planned_fields = () if model.has_context else ("max_num_seqs",)
    device = model.device if isinstance(model.device, str) else "cuda"
    return EngineConfig(
        model=checkpoint,
        device=device,
        memory_bytes=model.memory,
        enable_sleep_mode=model.residency == "sleepable" and model.tensor_parallel_size == 1,
        **{field: getattr(model, field) for field in EngineSettings.__struct_fields__ if field not in planned_fields},
    )
