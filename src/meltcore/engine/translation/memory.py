"""Computes the memory of a translation engine: weights, slots and, with a budget on a GPU, the workspace.

This module does not import torch: `meltcore plan` calls these functions without a GPU, and the engine calls them at its
start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from meltcore.common.errors import BudgetError
from meltcore.common.sizes import size_text
from meltcore.engine.memory.graph_sizes import packed_sizes
from meltcore.engine.memory.memory_needs import PlannedEngine, budget_rows, concurrency, weight_element_size
from meltcore.engine.memory.memory_plan import unused
from meltcore.engine.memory.workspace import BATCH_GAPS, LEAST_BATCH_GAP_BYTES, LIBRARY_BYTES, graph_node_bytes
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.task_configs import NUM_BEAMS, IndicTrans2Config, graph_rows
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

# Sentences that are decoded together at most. More do not make a device faster, and delay what arrives meanwhile.
MAX_SLOTS = {"cuda": 1024, "cpu": 32}
# Source tokens that a translation engine with a budget encodes together.
BUDGET_ENCODER_TOKENS = 1024
# For workspaces of libraries, fragmentation and activations of the encoder. An engine with a budget in bytes on a GPU
# computes them instead.
_RESERVE = 0.15
_TOKEN_BYTES = 8
# torch takes 20 MiB for a tensor of 1 to 10 MiB: one segment for tables, two for steps and two for captures.
_SEGMENTS_BYTES = 5 * 20 * 2**20


def translation_workspace(config: IndicTrans2Config, element_size: int, slots: int, *, num_beams: int) -> int:
    """Return the bytes that an engine with a budget on a GPU needs beside weights and slots.

    These are activations of the encoder and of a step that runs before its graph is captured, CUDA graphs, and
    libraries.
    """
    hidden, ffn = config.hidden_size, max(config.encoder.ffn_size, config.decoder.ffn_size)
    # Hidden states, norm, three projections, attended values and output; the feed-forward before and after activation;
    # keys and values for one layer of the decoder, as projected and as copied.
    encoder = BUDGET_ENCODER_TOKENS * (8 * hidden + 2 * ffn + 4 * hidden) * element_size
    values = (12 * hidden + 2 * ffn) * element_size
    step_bytes = slots * num_beams * (config.decoder.vocab_size * (element_size + 4) + values)
    nodes = translation_graph_bytes(config, slots)
    # The tokens of all beams: two tables, and seven copies in a step and in its graph each. In large models the bound
    # of the activations holds them and the segments. The bundled one ran out of 512 MiB at its first graph (H200).
    tokens = slots * num_beams * config.max_target_positions * _TOKEN_BYTES
    gaps = max(
        LEAST_BATCH_GAP_BYTES,
        int((encoder + step_bytes) * BATCH_GAPS),
        _SEGMENTS_BYTES + 16 * tokens - encoder - step_bytes,
    )
    tables = (config.max_source_positions + config.max_target_positions + 2) * hidden * element_size
    return encoder + step_bytes + nodes + gaps + tables + LIBRARY_BYTES


def translation_graph_bytes(config: IndicTrans2Config, slots: int) -> int:
    """Return the bytes of the graphs of steps and of the encoder that torch does not allocate."""
    steps = graph_node_bytes(len(graph_rows(slots)), config.decoder.num_layers)
    return steps + graph_node_bytes(len(packed_sizes(BUDGET_ENCODER_TOKENS)), config.encoder.num_layers)


def plan_slots(
    weight_bytes: int,
    slot_bytes: int,
    memory_bytes: int,
    limit: int,
    workspace: Callable[[int], int] | None = None,
) -> int:
    """Return the number of slots that fit into `memory_bytes` beside the weights and the spare slot, at most `limit`.

    For an engine with a budget on a GPU, `workspace` returns the bytes that a number of slots needs. None reserves a
    fraction. Raises BudgetError if memory is not enough for one slot.
    """
    if workspace is None:
        slots = min(limit, (int(memory_bytes * (1 - _RESERVE)) - weight_bytes) // slot_bytes - 1)
        needed_bytes = (weight_bytes + 2 * slot_bytes) / (1 - _RESERVE)
    else:
        slots = min(limit, (memory_bytes - weight_bytes - workspace(1)) // slot_bytes - 1)
        while slots > 1 and weight_bytes + (slots + 1) * slot_bytes + workspace(slots) > memory_bytes:
            slots -= 1
        needed_bytes = weight_bytes + 2 * slot_bytes + workspace(1)
    if slots < 1:
        raise BudgetError(
            f"{size_text(memory_bytes)} must hold the weights, a slot for one sentence and a spare one: "
            f"{size_text(needed_bytes)}. Raise --memory."
        )
    return slots


def translation_needs(
    model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str, weight_bytes: int
) -> PlannedEngine:
    """Return the memory of an engine of a model. `source` says where the sizes were read."""
    config, element_size = IndicTrans2Config.read(checkpoint.config), weight_element_size(model, on_cpu)
    source_tokens, tokens = config.sentence_limits(model.max_model_len)
    slot = config.slot_bytes(element_size, num_beams=NUM_BEAMS, max_new_tokens=tokens, max_source=source_tokens)
    limit = MAX_SLOTS["cpu" if on_cpu else "cuda"]
    workspace = partial(translation_workspace, config, element_size, num_beams=NUM_BEAMS)
    sentences = min(concurrency(model), limit)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        slots = plan_slots(weight_bytes, slot, memory_bytes, limit, None if on_cpu else workspace)
        rows = [MemoryRow("weights", weight_bytes), MemoryRow("slots", (slots + 1) * slot, f"of {slots} sentences")]
        if not on_cpu:
            rows.append(MemoryRow("workspace", workspace(slots), "of the encoder, graphs and libraries"))
        return slots >= sentences, [*rows, unused(memory_bytes, rows)]

    budget, rows = budget_rows(model, divide)
    return PlannedEngine(model.task, budget, rows, model.max_model_len, sentences, source)
