"""Computes the memory of a generation engine for a context and a concurrency. No torch, no GPU and no weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meltcore.engine.core.kv_cache import PageLayout
from meltcore.engine.memory.memory_needs import (
    DTYPE_BYTES,
    EngineNeeds,
    UnknownSizesError,
    budget_rows,
    concurrency,
    weight_element_size,
)
from meltcore.engine.memory.memory_plan import PENALTY_FRACTION, RESERVE_FRACTION, ModelShape, plan_memory
from meltcore.engine.memory.workspace import PENALTY_BYTES
from meltcore.kernels.gemm.half_sizes import processor_packs_half, stores_half
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.quantization_config import AwqConfig, GptqConfig, read_quantization_config
from meltcore.models.decoders.decoder_config import DecoderConfig
from meltcore.models.decoders.decoder_families import DECODER_CONFIGS
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.quantized.quantized_sizes import int4_host_bytes, quantized_weight_bytes
from meltcore.models.quantized.step_sizes import decoder_step
from meltcore.models.quantized.weight_sizes import (
    WeightFormat,
    decoder_cache_specs,
    decoder_host_bytes,
    decoder_weight_bytes,
    largest_slice,
)
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

if TYPE_CHECKING:
    from meltcore.models.checkpoints.gguf.gguf_file import (
        GGUFModel,  # imports gguf and numpy, which the supervisor does not need
    )

# Tokens per step where the file names no number. Steps of models that share a GPU are short, so that others get their
# turn; a sliding window keeps as many tokens more of each step.
_BATCHED_TOKENS, _SLIDING_BATCHED_TOKENS = 2048, 1024
# What an engine holds of a GPU while it sleeps, beside its context and the token counts of penalties.
_ASLEEP_BYTES = 64 * 2**20


def generation_needs(model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str) -> EngineNeeds:
    """Return the memory of an engine of a model. `source` says where its sizes come from."""
    architectures = checkpoint.config.get("architectures") or []
    known = [each for each in architectures if each in DECODER_CONFIGS]
    if not known:
        raise UnknownSizesError(
            f"{checkpoint.name}: config.json names {', '.join(architectures) or 'nothing'}; not a model here"
        )
    config, ranks = DECODER_CONFIGS[known[0]](checkpoint.config), model.tensor_parallel_size
    stored = checkpoint.text_config.get("dtype") or checkpoint.text_config.get("torch_dtype") or "bfloat16"
    element_size, weight_note = weight_element_size(model, on_cpu, str(stored)), ""
    is_packed = checkpoint.gguf is not None or model.format in ("q4_0", "q8_0")
    # A CPU converts what it loads, unless the engine must be able to load it again when it wakes.
    on_host = on_cpu and element_size == DTYPE_BYTES["float32"] and model.residency != "sleepable"
    if checkpoint.gguf is not None and model.quantization == "none":
        weight_bytes, weight_note = _gguf_weights(checkpoint.gguf, config, element_size, ranks, on_host=on_host)
        source = "header of the GGUF file"
    else:
        published = read_quantization_config(checkpoint.config) if model.format == "auto" else None
        if published is None and on_host and model.quantization == "none" and stores_half([str(stored)]):
            weight_bytes = decoder_host_bytes(
                config, weight_format=_weight_format(model), packs_half=processor_packs_half(), ranks=ranks
            )
        elif published is None:
            weight_bytes = decoder_weight_bytes(
                config, element_size=element_size, weight_format=_weight_format(model), ranks=ranks
            )
        elif on_host and isinstance(published, AwqConfig | GptqConfig):
            packs_half = processor_packs_half()
            form = {"packs_half": packs_half, "dense_in_half": packs_half and stores_half([str(stored)])}
            weight_bytes = int4_host_bytes(config, checkpoint.config, published, **form, ranks=ranks)
        else:
            weight_bytes = quantized_weight_bytes(
                config, checkpoint.config, published, element_size=element_size, ranks=ranks
            )
            is_packed = isinstance(published, AwqConfig | GptqConfig)
    caches = group_layers(decoder_cache_specs(config, ranks))
    cache_size = 1 if model.kv_cache_dtype == "fp8" else element_size
    scratch = largest_slice(config, ranks) * element_size if is_packed and not on_host else 0
    step = decoder_step(config, element_size, is_packed=is_packed, ranks=ranks)
    shape = ModelShape(weight_bytes, config.vocab_size, caches, element_size, cache_size, scratch, step)
    length = min(model.max_model_len or config.max_context, config.max_context)
    seqs = concurrency(model)
    layout = PageLayout.of(caches)
    batched = model.max_num_batched_tokens or _batched_tokens(layout, on_cpu)
    pages = layout.pages_together(seqs, length, batched)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        plan = plan_memory(
            shape,
            memory_bytes=memory_bytes,
            max_model_len=length,
            max_num_seqs=seqs,
            max_num_batched_tokens=batched,
            may_run_fewer=False,
            snapshots=model.enable_prefix_caching,
            has_graphs=None if on_cpu else not model.enforce_eager,
        )
        rows = [MemoryRow(row.name, row.size_bytes, weight_note) if row.name == "weights" else row for row in plan.rows]
        return plan.pages >= pages, rows

    budget, rows = budget_rows(model, divide)
    penalty_bytes = min(seqs * PENALTY_BYTES * config.vocab_size, int(budget * RESERVE_FRACTION * PENALTY_FRACTION))
    asleep_bytes = _ASLEEP_BYTES + penalty_bytes
    return EngineNeeds(model.task, budget, rows, length, seqs, source, batched, asleep_bytes)


def _batched_tokens(layout: PageLayout, on_cpu: bool) -> int:
    return _SLIDING_BATCHED_TOKENS if layout.sliding and not on_cpu else _BATCHED_TOKENS


def _weight_format(model: ModelSection) -> WeightFormat:
    if model.quantization == "fp8":
        return "fp8"
    return "dense" if model.format == "auto" else model.format


def _gguf_weights(
    gguf: GGUFModel, config: DecoderConfig, element_size: int, ranks: int, *, on_host: bool
) -> tuple[int, str]:
    """Return the bytes of a GGUF file's weights on one rank, and a note on formats that are held as other formats.

    With `on_host` a CPU converts them when they are loaded.
    """
    from meltcore.models.checkpoints.gguf.gguf_formats import describe_on_host, restored_formats
    from meltcore.models.quantized.gguf_sizes import device_weight_bytes, host_weight_bytes

    tensors = gguf.tensors
    if on_host:
        host_bytes, form = host_weight_bytes(tensors, config, packs_half=processor_packs_half(), ranks=ranks)
        return host_bytes, describe_on_host(tensors, form) if form else ""
    uses = restored_formats(tensors, element_size)
    return device_weight_bytes(tensors, config, element_size, ranks), "; ".join(use.describe() for use in uses)
