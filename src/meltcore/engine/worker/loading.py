"""Loads a model to its device and plans its memory, for an engine without ranks and for each rank."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from meltcore.common.errors import BudgetError, ConfigError
from meltcore.common.host_memory import trim_memory
from meltcore.common.sizes import size_text
from meltcore.engine.core.kv_cache import PageLayout
from meltcore.engine.host.device import byte_budget, default_batched_tokens, has_budget
from meltcore.engine.memory.memory_needs import UnknownSizesError
from meltcore.engine.memory.memory_plan import DEFAULT_SEQS, MemoryPlan, ModelShape, plan_memory, smallest_budget
from meltcore.kernels.fp8.fp8 import FP8
from meltcore.kernels.memory_pools import free_cached_memory
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import Checkpoint, Progress, open_checkpoint
from meltcore.models.configs.config_fields import MAX_POSITIONS
from meltcore.models.configs.quantization_config import without_quantization
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.decoders.model import Model
from meltcore.models.decoders.rope import apply_overrides, scaling_for
from meltcore.models.loader import (
    TORCH_DTYPES,
    build_meta_model,
    build_model,
    default_dtype,
    fill_dummy_weights,
    load_weights,
    matrix_dtypes,
    planned_device,
)
from meltcore.models.quantized.host_weights import HostWeights, host_weights, weight_bytes
from meltcore.models.quantized.quantization import largest_slices, quantize_as_llama_cpp, require_fp8, scratch_bytes
from meltcore.models.quantized.step_sizes import decoder_step
from meltcore.models.registry import ARCHITECTURES
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.config import EngineConfig
from meltcore.settings.fleet_spec import ModelSection

if TYPE_CHECKING:
    from meltcore.models.checkpoints.gguf.gguf_file import GGUFModel

# Without --memory a CPU keeps pages for one full context, and for sequences of this many tokens: 16 of them, or as many
# as this much memory holds. Sixteen full contexts would take gigabytes.
_USUAL_TOKENS, _HOST_LEAST_BYTES = 1024, 2**30


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
    checkpoint = replace(checkpoint, config=apply_overrides(checkpoint.config, config.hf_overrides))
    dtype = _choose_dtype(checkpoint, config, device)
    model = build_model(checkpoint, dtype, device, config.quantization, group, has_mtp=config.has_mtp)
    max_model_len = _context_limit(config, model)
    cache_dtype = _cache_dtype(model, config, device)
    # Loading and the rotary table only take memory: what does not fit now never will.
    held, note = _choose_host_weights(config, checkpoint, model, device, max_model_len, cache_dtype)
    if config.quantization == "none" and checkpoint.gguf is not None:
        from meltcore.models.checkpoints.gguf.gguf_formats import (
            describe_on_host,  # imports gguf, which other checkpoints do not need
        )

        note = describe_on_host(checkpoint.gguf.tensors, note) if held is not None else note
        if group is None or group.rank == 0:
            _report_formats(checkpoint.gguf, dtype, note, held, ranks=config.tensor_parallel_size)
    fill_weights(model, config, checkpoint, progress)
    if held is not None:
        held.convert(progress)
        trim_memory()
    free_cached_memory(device)
    model.prepare(max_model_len)
    free_cached_memory(device)  # the plan counts what is free
    plan = _plan_memory(config, model, device, max_model_len, cache_dtype)
    rows = [MemoryRow(row.name, row.size_bytes, note if row.name == "weights" else row.note) for row in plan.rows]
    return LoadedModel(model, device, max_model_len, cache_dtype, plan._replace(rows=rows))


def _choose_host_weights(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: Model,
    device: torch.device,
    max_model_len: int,
    cache_dtype: torch.dtype,
) -> tuple[HostWeights | None, str]:
    """Return how a CPU converts the weights, and a text about it for the user.

    The result is None if the weights stay as they are loaded. Raises ConfigError if no context of `max_model_len`
    tokens fits beside the weights. An engine that can sleep keeps the weights as they are loaded, since it loads them
    again when it wakes.
    """
    held = None
    if device.type == "cpu" and not config.enable_sleep_mode:
        held = host_weights(model, matrix_dtypes(checkpoint))
    if held is not None:
        note = held.note
        try:
            _plan_memory(config, model, device, max_model_len, cache_dtype, held)
            return held, note
        except BudgetError:  # the blocks may fit
            pass
    plan = _plan_memory(config, model, device, max_model_len, cache_dtype)
    if held is None:
        return None, next(row.note for row in plan.rows if row.name == "weights")
    missing = size_text(held.total_bytes - weight_bytes(model))
    note = f"converted at each step, which is slow: {note} they need {missing} more"
    print(f"meltcore: weights of {checkpoint.name} are {note}", file=sys.stderr)
    return None, note


def _report_formats(gguf: GGUFModel, dtype: torch.dtype, note: str, held: HostWeights | None, *, ranks: int) -> None:
    """Print a line for each format of a GGUF file that the device holds in another format.

    If a CPU converts the weights once more, one line describes all of them, and further lines the formats that are
    rounded.
    """
    from meltcore.models.checkpoints.gguf.gguf_formats import restored_formats

    lines = [use.describe() for use in restored_formats(gguf.tensors, dtype.itemsize) if held is None or use.loss]
    if held is not None:
        lines.append(f"weights: {note}, take {size_text(held.total_bytes * ranks)}")
    for line in lines:
        print(f"meltcore: {gguf.path.name}: {line}", file=sys.stderr)


def fill_weights(model: Model, config: EngineConfig, checkpoint: Checkpoint, progress: Progress) -> None:
    """Fill the weights from the checkpoint's files, or with random values. Raises ConfigError if a file is invalid."""
    if config.load_format == "dummy":
        fill_dummy_weights(model, checkpoint, config.seed)
    else:
        load_weights(model, checkpoint, progress)


def check_shards(config: EngineConfig, checkpoint: Checkpoint, device: torch.device) -> None:
    """Raise the ConfigError that `load` would raise on every rank of a group.

    The check runs before any rank loads. So the user gets a single message, before the ranks join the group.
    """
    checkpoint = replace(checkpoint, config=apply_overrides(checkpoint.config, config.hf_overrides))
    dtype = _choose_dtype(checkpoint, config, device)
    model = build_meta_model(
        *(checkpoint, dtype, device, config.quantization, TensorParallelGroup(0, config.tensor_parallel_size)),
        has_mtp=config.has_mtp,
    )
    sizes = _context_limit(config, model), _cache_dtype(model, config, device)
    _choose_host_weights(config, checkpoint, model, device, *sizes)


def _plan_memory(
    config: EngineConfig,
    model: Model,
    device: torch.device,
    max_model_len: int,
    cache_dtype: torch.dtype,
    held: HostWeights | None = None,
) -> MemoryPlan:
    """Return the memory plan. `held` says how the weights will be converted, and None that they are not converted."""
    shape = _shape(model, device, cache_dtype, config.tensor_parallel_size, held)
    divide = partial(
        plan_memory,
        shape,
        max_model_len=max_model_len,
        max_num_seqs=default_if_none(config.max_num_seqs, device, cuda=1024, cpu=256),
        max_num_batched_tokens=batched_tokens(config, device),
        may_run_fewer=config.max_num_seqs is None,
        snapshots=config.enable_prefix_caching,
        has_graphs=not config.enforce_eager if has_budget(config, device) else None,
        window=1 + config.max_drafts,
    )
    memory_bytes = byte_budget(config, device, 0 if model.device.type == "meta" else shape.weight_bytes)
    if device.type == "cpu" and config.memory_bytes is None:
        memory_bytes = min(memory_bytes, _default_host_bytes(config, shape, max_model_len, divide, memory_bytes))
    return divide(memory_bytes=memory_bytes)


def _shape(
    model: Model, device: torch.device, cache_dtype: torch.dtype, ranks: int, held: HostWeights | None
) -> ModelShape:
    """Return the sizes of a model, which may be on the meta device. `held` is as in `_plan_memory`."""
    scratch, specs = scratch_bytes(model, device) if held is None else 0, model.kv_cache_specs()
    slices, mtp_layers = largest_slices(model) if scratch else None, len(specs) - model.config.num_hidden_layers
    return ModelShape(
        weight_bytes(model) if held is None else held.total_bytes,
        model.config.vocab_size,
        group_layers(specs),
        model.dtype.itemsize,
        cache_dtype.itemsize,
        scratch,
        decoder_step(model.config, model.dtype.itemsize, slices, ranks=ranks, mtp_layers=mtp_layers),
    )


def meta_decoder(model: ModelSection, on_cpu: bool) -> tuple[Model, Checkpoint, torch.dtype]:
    """Build a model on the meta device as an engine holds its weights. Return it, its checkpoint and its data type.

    Raises UnknownSizesError for an unknown architecture. Raises ConfigError if an engine could not serve the model.
    """
    checkpoint = open_checkpoint(model.model, files="config")
    checkpoint = replace(checkpoint, config=apply_overrides(checkpoint.config, model.hf_overrides))
    names = checkpoint.config["architectures"]
    if not any(name in ARCHITECTURES for name in names):
        raise UnknownSizesError(f"{checkpoint.name}: config.json names {', '.join(names)}; not a model here")
    if model.format != "auto":
        checkpoint = replace(checkpoint, config=without_quantization(checkpoint.config))
    config = EngineConfig(model=model.model, dtype=model.dtype)
    device, ranks = planned_device(on_cpu), model.tensor_parallel_size
    group = TensorParallelGroup(0, ranks) if ranks > 1 else None
    dtype, meta = _choose_dtype(checkpoint, config, device), torch.device("meta")
    decoder = build_meta_model(
        checkpoint, dtype, meta, model.quantization, group, reads_files=False, has_mtp=model.has_mtp
    )
    if model.format in ("q4_0", "q8_0") and checkpoint.gguf is None:
        with meta, default_dtype(dtype):
            quantize_as_llama_cpp(decoder, model.format)
    return decoder, checkpoint, dtype


def decoder_sizes(model: ModelSection, on_cpu: bool) -> tuple[ModelShape, int, str]:
    """Return a model's sizes with a cache of the model's type, its context, and a note on converted weights.

    Raises the errors of `meta_decoder`.
    """
    decoder, checkpoint, dtype = meta_decoder(model, on_cpu)
    held, note = None, ""
    if on_cpu and model.residency != "sleepable":
        held = host_weights(decoder, matrix_dtypes(checkpoint, reads_files=False))
    if checkpoint.gguf is not None and model.quantization == "none":
        from meltcore.models.checkpoints.gguf.gguf_formats import describe_on_host, restored_formats

        tensors = checkpoint.gguf.tensors
        uses = restored_formats(tensors, dtype.itemsize)
        note = describe_on_host(tensors, held.note) if held else "; ".join(use.describe() for use in uses)
    shape = _shape(decoder, planned_device(on_cpu), dtype, model.tensor_parallel_size, held)
    return shape, decoder.config.max_context, note


def _default_host_bytes(
    config: EngineConfig, shape: ModelShape, max_model_len: int, divide: Callable[..., MemoryPlan], most_bytes: int
) -> int:
    """Return the bytes of host memory that an engine takes without --memory.

    The bytes are enough for --max-num-seqs sequences of the whole context. Without that option they are enough for one
    such sequence, or for several of usual length.
    """
    layout, tokens = PageLayout.of(shape.caches), batched_tokens(config, torch.device("cpu"))
    seqs = config.max_num_seqs or DEFAULT_SEQS
    if config.max_num_seqs is None:
        usual = layout.pages_together(seqs, min(max_model_len, _USUAL_TOKENS), tokens)
        pages = max(usual, layout.pages_together(1, max_model_len, tokens))
    else:
        pages = layout.pages_together(seqs, max_model_len, tokens)

    def is_enough(memory_bytes: int) -> bool:
        plan = divide(memory_bytes=memory_bytes)
        return plan.pages >= pages and min(plan.max_num_seqs, plan.penalty_slots) >= seqs

    smallest = smallest_budget(is_enough, most_bytes)
    return most_bytes if smallest is None else max(smallest, _HOST_LEAST_BYTES)


def default_if_none(value: int | None, device: torch.device, *, cuda: int, cpu: int) -> int:
    """Return `value`, or the default for the type of device if `value` is None."""
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
