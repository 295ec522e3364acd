"""From settings to a model on its device and a plan for the memory it leaves; the same for an engine and each rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.config import EngineConfig
from meltcore.engine.memory import HOST_SHARE, MemoryPlan, free_bytes, plan_memory
from meltcore.errors import ConfigError
from meltcore.kernels.fp8 import FP8
from meltcore.layers.group import Group
from meltcore.models.checkpoint import Checkpoint
from meltcore.models.decoder import Decoder
from meltcore.models.loader import Progress, build_model, fill_dummy_weights, load_weights, outline_model
from meltcore.models.quantization import require_fp8
from meltcore.models.room import host_available_bytes

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Loaded(NamedTuple):
    model: Decoder
    device: torch.device
    max_model_len: int
    cache_dtype: torch.dtype
    plan: MemoryPlan


def load(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, progress: Progress, group: Group | None = None
) -> Loaded:
    """The whole model, or with a group one rank's share. Raises ConfigError where a setting cannot work, before any
    weight is read wherever that is known."""
    dtype = _choose_dtype(checkpoint, config, device)
    model = build_model(checkpoint, dtype, device, config.quantization, group)
    max_model_len = _context_limit(config, model)
    cache_dtype = _cache_dtype(model, config, device)
    # Loading and rotary table leave no more memory than there is now: what does not fit yet never will.
    _plan(config, model, device, max_model_len, cache_dtype)
    if config.load_format == "dummy":
        fill_dummy_weights(model, config.seed)
    else:
        load_weights(model, checkpoint, progress)
    model.prepare(max_model_len)
    plan = _plan(config, model, device, max_model_len, cache_dtype)
    return Loaded(model, device, max_model_len, cache_dtype, plan)


def check_shares(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> None:
    """Raise ConfigError where `load` would on every rank of a group, before any of them is told to load: the user is
    told once, and not after all have met."""
    dtype = _choose_dtype(checkpoint, config, device)
    model = outline_model(checkpoint, dtype, device, config.quantization, Group(0, config.tp))
    _plan(config, model, device, _context_limit(config, model), _cache_dtype(model, config, device))


def _plan(
    config: EngineConfig, model: Decoder, device: torch.device, max_model_len: int, cache_dtype: torch.dtype
) -> MemoryPlan:
    memory_bytes = _memory_bytes(config, device)
    if memory_bytes is None and model.embedding.is_meta:
        memory_bytes = free_bytes(device)  # the weights are not there yet: their room is part of it
    return plan_memory(
        model,
        memory_bytes=memory_bytes,
        max_model_len=max_model_len,
        max_num_seqs=or_default(config.max_num_seqs, device, cuda=1024, cpu=256),
        may_run_fewer=config.max_num_seqs is None,
        cache_dtype=cache_dtype,
        snapshots="no-prefix-cache" not in config.debug,
    )


def choose_device(name: str, *, ranks: int = 1, rank: int = 0) -> torch.device:
    """Of one of `ranks` ranks, on neighbouring GPUs. auto: from the first GPU on, where there is one.

    Raises ConfigError for a device that is not there.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name}: must be auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device {name}: must be auto, cpu, cuda or cuda:N")
    if device.type == "cpu":
        return device
    first, there = device.index or 0, torch.cuda.device_count()
    if first >= there:
        raise ConfigError(f"--device {name}: torch sees {there} CUDA devices")
    if first + ranks > there:
        raise ConfigError(f"--tp {ranks} needs {ranks} GPUs from cuda:{first} on; torch sees {there} CUDA devices")
    return torch.device("cuda", first + rank) if ranks > 1 else device


def or_default(value: int | None, device: torch.device, *, cuda: int, cpu: int) -> int:
    if value is not None:
        return value
    return cuda if device.type == "cuda" else cpu


def _memory_bytes(config: EngineConfig, device: torch.device) -> int | None:
    """What a rank may take; None to let the device say. Ranks on a CPU share its memory."""
    if config.memory_bytes is None and config.tp > 1 and device.type == "cpu":
        return int(host_available_bytes() * HOST_SHARE) // config.tp
    return config.memory_bytes


def _choose_dtype(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    stored = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype") or "bfloat16"
    if not isinstance(stored, str) or stored not in _DTYPES:
        raise ConfigError(f"{checkpoint.name} is stored as {stored}; name one of {', '.join(_DTYPES)} with --dtype")
    return _DTYPES[stored]


def _cache_dtype(model: Decoder, config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return model.embedding.dtype
    require_fp8("--kv-cache-dtype fp8", device)
    return FP8


def _context_limit(config: EngineConfig, model: Decoder) -> int:
    most = model.config.max_position_embeddings
    if config.max_model_len is None:
        return most
    if not 2 <= config.max_model_len <= most:
        raise ConfigError(f"--max-model-len must be from 2 to the model's {most}; got {config.max_model_len}")
    return config.max_model_len
