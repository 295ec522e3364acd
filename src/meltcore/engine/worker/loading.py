"""Loads a model to its device and plans its memory, for an engine and for each rank alike."""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch

from meltcore.config import EngineConfig
from meltcore.engine.core.memory_plan import MemoryPlan, ModelShape, plan_memory
from meltcore.engine.host.device import byte_budget, default_batched_tokens, has_budget
from meltcore.errors import ConfigError
from meltcore.kernels.memory_pools import free_cached_memory
from meltcore.kernels.quant.fp8 import FP8
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoint import Checkpoint
from meltcore.models.config_fields import MAX_POSITIONS
from meltcore.models.kv_cache_specs import group_layers
from meltcore.models.loader import (
    TORCH_DTYPES,
    Progress,
    build_meta_model,
    build_model,
    fill_dummy_weights,
    load_weights,
)
from meltcore.models.model import Model
from meltcore.models.quantization import require_fp8, scratch_bytes
from meltcore.models.rope import apply_overrides, scaling_for
from meltcore.models.step_sizes import decoder_step


class LoadedModel(NamedTuple):
    """A model with its weights, and its memory plan."""

    model: Model
    device: torch.device
    max_model_len: int
    cache_dtype: torch.dtype
    plan: MemoryPlan


def load(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Progress,
    group: TensorParallelGroup | None = None,
) -> LoadedModel:
    """Load the whole model, or with a group one rank's shard.

    Raises ConfigError for a setting that cannot work, if possible before any weight is read.
    """
    checkpoint = apply_overrides(checkpoint, config.hf_overrides)
    dtype = _choose_dtype(checkpoint, config, device)
    model = build_model(checkpoint, dtype, device, config.quantization, group)
    if config.quantization == "none" and (group is None or group.rank == 0):
        _report_restored_formats(checkpoint, dtype, device)
    max_model_len = _context_limit(config, model)
    cache_dtype = _cache_dtype(model, config, device)
    # Loading and the rotary table only take memory: what does not fit now never will.
    _plan(config, model, device, max_model_len, cache_dtype)
    fill_weights(model, config, checkpoint, progress)
    free_cached_memory(device)
    model.prepare(max_model_len)
    free_cached_memory(device)  # the plan counts what is free
    plan = _plan(config, model, device, max_model_len, cache_dtype)
    return LoadedModel(model, device, max_model_len, cache_dtype, plan)


def _report_restored_formats(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    """Print a line for each format of a GGUF file that the device holds as another one."""
    if checkpoint.gguf is None:
        return
    from meltcore.models.gguf_formats import restored_formats  # imports gguf, which other checkpoints do not need

    for use in restored_formats(checkpoint.gguf.tensors, dtype.itemsize, on_cpu=device.type == "cpu"):
        print(f"meltcore: {checkpoint.gguf.path.name}: {use.describe()}", file=sys.stderr)


def fill_weights(model: Model, config: EngineConfig, checkpoint: Checkpoint, progress: Progress) -> None:
    """Fill the weights from the checkpoint's files, or with random values. Raises ConfigError for a bad file."""
    if config.load_format == "dummy":
        fill_dummy_weights(model, checkpoint, config.seed)
    else:
        load_weights(model, checkpoint, progress)


def check_shards(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> None:
    """Raise ConfigError when `load` would on every rank of a group.

    Called before any rank loads: the user gets one message, and not after all ranks have joined the group.
    """
    checkpoint = apply_overrides(checkpoint, config.hf_overrides)
    dtype = _choose_dtype(checkpoint, config, device)
    model = build_meta_model(
        checkpoint, dtype, device, config.quantization, TensorParallelGroup(0, config.tensor_parallel_size)
    )
    _plan(config, model, device, _context_limit(config, model), _cache_dtype(model, config, device))


def _plan(
    config: EngineConfig, model: Model, device: torch.device, max_model_len: int, cache_dtype: torch.dtype
) -> MemoryPlan:
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    shape = ModelShape(
        weight_bytes,
        model.config.vocab_size,
        group_layers(model.kv_cache_specs()),
        model.dtype.itemsize,
        cache_dtype.itemsize,
        scratch_bytes(model, device),
        decoder_step(
            model.config,
            model.dtype.itemsize,
            is_packed=scratch_bytes(model, device) > 0,
            ranks=config.tensor_parallel_size,
        ),
    )
    return plan_memory(
        shape,
        memory_bytes=byte_budget(config, device, 0 if model.device.type == "meta" else weight_bytes),
        max_model_len=max_model_len,
        max_num_seqs=default_if_none(config.max_num_seqs, device, cuda=1024, cpu=256),
        max_num_batched_tokens=batched_tokens(config, device),
        may_run_fewer=config.max_num_seqs is None,
        snapshots=config.enable_prefix_caching,
        has_graphs=not config.enforce_eager if has_budget(config, device) else None,
    )


def default_if_none(value: int | None, device: torch.device, *, cuda: int, cpu: int) -> int:
    """Return a setting, or its default for the type of device."""
    if value is not None:
        return value
    return cuda if device.type == "cuda" else cpu


def batched_tokens(config: EngineConfig, device: torch.device) -> int:
    """Return the token budget of a step."""
    return config.max_num_batched_tokens or default_batched_tokens(device)


def _choose_dtype(checkpoint: Checkpoint, config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        return TORCH_DTYPES[config.dtype]
    if device.type == "cpu":
        return torch.float32
    checkpoint_dtype = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype") or "bfloat16"
    if not isinstance(checkpoint_dtype, str) or checkpoint_dtype not in TORCH_DTYPES:
        raise ConfigError(
            f"{checkpoint.name} is stored as {checkpoint_dtype}; name one of {', '.join(TORCH_DTYPES)} with --dtype"
        )
    return TORCH_DTYPES[checkpoint_dtype]


def _cache_dtype(model: Model, config: EngineConfig, device: torch.device) -> torch.dtype:
    if config.kv_cache_dtype == "auto":
        return model.dtype
    require_fp8("--kv-cache-dtype fp8", device)
    return FP8


def _context_limit(config: EngineConfig, model: Model) -> int:
    max_context = model.config.max_context
    max_model_len = config.max_model_len
    if max_model_len is None:
        return max_context
    if 2 <= max_model_len <= max_context:
        return max_model_len
    reason = f"--max-model-len must be from 2 to the model's {max_context}; got {max_model_len}"
    if max_context < max_model_len <= MAX_POSITIONS:
        published_len = model.config.max_position_embeddings
        reason += f". For a longer context state a RoPE scaling: {scaling_for(max_model_len, published_len)}"
    raise ConfigError(reason)
