"""Computes the memory of a generation engine for a context and a concurrency, without torch, a GPU or weights."""

from __future__ import annotations

from meltcore.common.errors import ConfigError
from meltcore.engine.core.kv_cache import PageLayout
from meltcore.engine.memory.memory_needs import PlannedEngine, budget_rows, concurrency
from meltcore.engine.memory.memory_plan import PENALTY_FRACTION, RESERVE_FRACTION, ModelShape, plan_memory
from meltcore.engine.memory.workspace import PENALTY_BYTES
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

# Tokens per step where the file names no number. Steps of models that share a GPU are short, so that others get their
# turn; a sliding window keeps as many tokens more of each step.
_BATCHED_TOKENS, _SLIDING_BATCHED_TOKENS = 2048, 1024
# What an engine holds of a GPU while it sleeps, beside its context and the token counts of penalties.
_ASLEEP_BYTES = 64 * 2**20


def generation_needs(
    model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str, sizes: tuple[ModelShape, int, str]
) -> PlannedEngine:
    """Return the memory that an engine of a model needs. `source` says where `decoder_sizes` has read the sizes."""
    shape, max_context, weight_note = sizes
    if checkpoint.gguf is not None and model.quantization == "none":
        source = "header of the GGUF file"
    if model.kv_cache_dtype == "fp8":
        shape = shape._replace(cache_element_size=1)
    if (length := model.max_model_len or max_context) > max_context:  # an engine would refuse it, too
        raise ConfigError(
            f"max_model_len: got {length}; must be at most the {max_context} tokens of {model.checkpoint}, "
            "unless rope_parameters in hf_overrides extend them"
        )
    seqs = concurrency(model)
    layout = PageLayout.of(shape.caches)
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
            window=1 + model.max_drafts,
        )
        rows = [MemoryRow(row.name, row.size_bytes, weight_note) if row.name == "weights" else row for row in plan.rows]
        return plan.pages >= pages, rows

    budget, rows = budget_rows(model, divide)
    penalty_bytes = min(seqs * PENALTY_BYTES * shape.vocab_size, int(budget * RESERVE_FRACTION * PENALTY_FRACTION))
    asleep_bytes = _ASLEEP_BYTES + penalty_bytes
    return PlannedEngine(model.task, budget, rows, length, seqs, source, batched, asleep_bytes)


def _batched_tokens(layout: PageLayout, on_cpu: bool) -> int:
    return _SLIDING_BATCHED_TOKENS if layout.sliding_groups and not on_cpu else _BATCHED_TOKENS
