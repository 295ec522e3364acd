"""Computes the memory of an embedding engine: weights and the activations of a batch.

This module does not import torch: `meltcore plan` calls these functions without a GPU, and the engine calls them at its
start.
"""

from __future__ import annotations

from meltcore.common.errors import ConfigError
from meltcore.common.sizes import size_text
from meltcore.engine.core.waiting import cost_buckets
from meltcore.engine.memory.memory_needs import PlannedEngine, budget_rows, concurrency, unused, weight_element_size
from meltcore.engine.memory.workspace import BATCH_GAPS, LEAST_BATCH_GAP_BYTES, LIBRARY_BYTES
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.encoder_config import EncoderConfig
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

# Tokens of a batch, padding included. More do not make a device faster, and delay what arrives meanwhile.
MAX_BATCH_TOKENS = {"cuda": 65_536, "cpu": 8_192}
# Hidden states that live together: input, sum and norm (float32 beside bfloat16), queries, keys, values, attended
# values, their copy, output.
_HIDDEN_TENSORS = 12
# For workspaces of libraries and fragmentation. An engine with a budget in bytes on a GPU computes them instead.
_RESERVE = 0.1


def padded_limit(max_tokens: int) -> int:
    """Return the number of tokens to which the longest input is padded."""
    return next(bucket for bucket in cost_buckets(2 * max_tokens) if bucket >= max_tokens)


def plan_embedding(
    config: EncoderConfig,
    *,
    weight_bytes: int,
    element_size: int,
    memory_bytes: int,
    max_tokens: int,
    limit: int,
    is_exact: bool,
) -> tuple[int, list[MemoryRow]]:
    """Return the maximum number of tokens of a batch with its padding, at most `limit`, and the memory table.

    With `is_exact` the engine has a budget on a GPU, and its workspace is computed instead of a fraction. Raises
    ConfigError if `memory_bytes` are not enough for one input of `max_tokens`.
    """
    longest = padded_limit(max_tokens)
    token_bytes = (_HIDDEN_TENSORS * config.hidden_size + 2 * config.intermediate_size) * element_size
    # Pooling in float32, and a mask of float values per pair of tokens, which some attention kernels make.
    token_bytes += 2 * config.hidden_size * 4 + longest * 4
    workspace, factor = 0, 1 - _RESERVE
    if is_exact:
        workspace, factor = LIBRARY_BYTES + LEAST_BATCH_GAP_BYTES, 1.0
        token_bytes = int(token_bytes * (1 + BATCH_GAPS))
    batch_tokens = min(limit, (int(memory_bytes * factor) - weight_bytes - workspace) // token_bytes)
    if batch_tokens < longest:
        needed_bytes = (weight_bytes + workspace + longest * token_bytes) / factor
        raise ConfigError(
            f"{size_text(memory_bytes)} must hold the weights and an input of {max_tokens} tokens, which take "
            f"{size_text(needed_bytes)}. Raise --memory, or lower --max-model-len."
        )
    rows = [
        MemoryRow("weights", weight_bytes),
        MemoryRow("activations", batch_tokens * token_bytes, f"of {batch_tokens:,} tokens per batch"),
        *([MemoryRow("workspace", workspace, "of libraries")] if workspace else []),
    ]
    return batch_tokens, rows


def embedding_needs(
    model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str, weight_bytes: int
) -> PlannedEngine:
    """Return the memory that an engine of a model needs. `source` says where the sizes were read."""
    config = EncoderConfig.read(checkpoint.config, checkpoint.folder)
    max_tokens, limit = config.input_limit(model.max_model_len), MAX_BATCH_TOKENS["cpu" if on_cpu else "cuda"]
    inputs = min(concurrency(model), max(1, limit // padded_limit(max_tokens)))

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        batch_tokens, rows = plan_embedding(
            config,
            weight_bytes=weight_bytes,
            element_size=weight_element_size(model, on_cpu),
            memory_bytes=memory_bytes,
            max_tokens=max_tokens,
            limit=limit,
            is_exact=not on_cpu,
        )
        return batch_tokens >= inputs * padded_limit(max_tokens), [*rows, unused(memory_bytes, rows)]

    budget, rows = budget_rows(model, divide)
    return PlannedEngine(model.task, budget, rows, max_tokens, inputs, source)
