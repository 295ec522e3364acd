"""Computes the memory of an embedding engine: weights and the activations of a batch.

This module does not import torch: `meltcore plan` calls these functions without a GPU, and the engine calls them at its
start.
"""

from __future__ import annotations

from meltcore.common.errors import BudgetError
from meltcore.common.sizes import size_text
from meltcore.engine.core.waiting import cost_buckets
from meltcore.engine.memory.graph_sizes import MAX_PACKED_TOKENS, MIN_ROW_TOKENS, packed_sizes
from meltcore.engine.memory.memory_needs import PlannedEngine, budget_rows, concurrency, weight_element_size
from meltcore.engine.memory.memory_plan import unused
from meltcore.engine.memory.workspace import BATCH_GAPS, LEAST_BATCH_GAP_BYTES, LIBRARY_BYTES, graph_node_bytes
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.encoder_config import EncoderConfig
from meltcore.models.configs.pooling_config import PoolingConfig
from meltcore.models.quantized.step_sizes import decoder_step
from meltcore.models.tasks.pooled_decoder_config import (
    GROUP_QUERIES,
    PAGE_SIZE,
    POOLED_ARCHITECTURES,
    PooledDecoderConfig,
)
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

# Tokens of a batch, padding included. More do not make a device faster, and delay what arrives meanwhile.
_MAX_BATCH_TOKENS = {"cuda": 65_536, "cpu": 8_192}
# Hidden states that live together: input, sum and norm (float32 beside bfloat16), queries, keys, values, attended
# values, their copy, output.
_HIDDEN_TENSORS = 12
# For workspaces of libraries and fragmentation. An engine with a budget in bytes on a GPU computes them instead.
_RESERVE = 0.1


def read_config(checkpoint: Checkpoint) -> EncoderConfig | PooledDecoderConfig:
    """Return the configuration of a model. Raises ConfigError for missing fields and unsupported values."""
    is_decoder = not POOLED_ARCHITECTURES.isdisjoint(checkpoint.config.get("architectures") or [])
    kind = PooledDecoderConfig if is_decoder else EncoderConfig
    return kind.read(checkpoint.config, checkpoint.folder)


def token_slots(config: PoolingConfig, num_tokens: int) -> int:
    """Return the number of tokens for which an input takes memory. A decoder's inputs take whole pages."""
    if isinstance(config, PooledDecoderConfig):
        return -(-num_tokens // PAGE_SIZE) * PAGE_SIZE
    return max(num_tokens, MIN_ROW_TOKENS)


def has_graphs(config: PoolingConfig, element_size: int, device: str) -> bool:
    """Return whether batches on a device of a type are CUDA graphs: of encoders in 16 bits on a GPU."""
    return isinstance(config, EncoderConfig) and element_size == 2 and device == "cuda"


def graph_bytes(config: PoolingConfig, batch_tokens: int) -> int:
    """Return the bytes of the graphs of an encoder that torch does not allocate."""
    assert isinstance(config, EncoderConfig)
    return graph_node_bytes(len(packed_sizes(batch_tokens)), config.num_layers)


def padded_limit(config: PoolingConfig, max_tokens: int) -> int:
    """Return the number of tokens to which the longest input is padded."""
    slots = token_slots(config, max_tokens)
    return next(bucket for bucket in cost_buckets(2 * slots) if bucket >= slots)


def batch_limit(config: PoolingConfig, element_size: int, device: str) -> int:
    """Return the number of tokens that a batch on a device of a type has at most, unless it is one longer input."""
    return MAX_PACKED_TOKENS if has_graphs(config, element_size, device) else _MAX_BATCH_TOKENS[device]


def _step_bytes(config: EncoderConfig | PooledDecoderConfig, element_size: int, longest: int) -> tuple[int, int]:
    """Return the bytes of a batch for each token, and those that do not depend on the number of tokens."""
    pooled_bytes = 2 * config.hidden_size * 4
    if isinstance(config, PooledDecoderConfig):
        decoder = config.decoder
        step = decoder_step(decoder, element_size)
        cache_bytes = 2 * decoder.num_key_value_heads * decoder.head_dim * element_size
        group_heads = decoder.num_attention_heads // decoder.num_key_value_heads
        mask_bytes = 2 * GROUP_QUERIES * longest * group_heads * 4
        fixed_bytes = step.fixed_bytes + config.most_tokens * step.position_bytes + mask_bytes
        return step.token_bytes + cache_bytes + pooled_bytes, fixed_bytes
    token_bytes = (_HIDDEN_TENSORS * config.hidden_size + 2 * config.intermediate_size) * element_size
    # A mask of float values per pair of tokens, which some attention kernels make.
    return token_bytes + pooled_bytes + longest * 4, 0


def plan_embedding(
    config: EncoderConfig | PooledDecoderConfig,
    *,
    weight_bytes: int,
    element_size: int,
    memory_bytes: int,
    max_tokens: int,
    device: str,
    is_exact: bool,
) -> tuple[int, list[MemoryRow]]:
    """Return the maximum number of tokens of a batch with its padding, and the memory table.

    A batch on a `device`, "cuda" or "cpu", has at most `batch_limit` tokens, or is one longer input.

    With `is_exact` the engine has a budget on a GPU, and its workspace is computed instead of a fraction. Raises
    ConfigError if `memory_bytes` are not enough for one input of `max_tokens`.
    """
    longest = padded_limit(config, max_tokens)
    token_bytes, workspace = _step_bytes(config, element_size, longest)
    factor, limit = 1 - _RESERVE, max(longest, batch_limit(config, element_size, device))
    if has_graphs(config, element_size, device):
        workspace += graph_bytes(config, limit)
    if is_exact:
        workspace, factor = workspace + LIBRARY_BYTES + LEAST_BATCH_GAP_BYTES, 1.0
        token_bytes = int(token_bytes * (1 + BATCH_GAPS))
    batch_tokens = min(limit, (int(memory_bytes * factor) - weight_bytes - workspace) // token_bytes)
    if batch_tokens < longest:
        needed_bytes = (weight_bytes + workspace + longest * token_bytes) / factor
        raise BudgetError(
            f"{size_text(memory_bytes)} must hold the weights and an input of {max_tokens} tokens, which take "
            f"{size_text(needed_bytes)}. Raise --memory, or lower --max-model-len."
        )
    rows = [
        MemoryRow("weights", weight_bytes),
        MemoryRow("activations", batch_tokens * token_bytes, f"of {batch_tokens:,} tokens per batch"),
        *([MemoryRow("workspace", workspace, "of libraries, graphs and masks")] if workspace else []),
    ]
    return batch_tokens, rows


def embedding_needs(
    model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str, weight_bytes: int
) -> PlannedEngine:
    """Return the memory that an engine of a model needs. `source` says where the sizes were read."""
    config = read_config(checkpoint)
    max_tokens, device = config.input_limit(model.max_model_len), "cpu" if on_cpu else "cuda"
    element_size = weight_element_size(model, on_cpu)
    longest = padded_limit(config, max_tokens)
    inputs = min(concurrency(model), max(1, batch_limit(config, element_size, device) // longest))

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        batch_tokens, rows = plan_embedding(
            config,
            weight_bytes=weight_bytes,
            element_size=element_size,
            memory_bytes=memory_bytes,
            max_tokens=max_tokens,
            device=device,
            is_exact=not on_cpu,
        )
        return batch_tokens >= inputs * longest, [*rows, unused(memory_bytes, rows)]

    budget, rows = budget_rows(model, divide)
    return PlannedEngine(model.task, budget, rows, max_tokens, inputs, source)
