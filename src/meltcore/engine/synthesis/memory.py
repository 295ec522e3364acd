"""Computes the memory of a synthesis engine: weights, batches, and requests that have begun.

This module does not import torch: `meltcore plan` calls these functions without a GPU, and the engine calls them at its
start.
"""

from __future__ import annotations

import math
from typing import Any

from meltcore.common.errors import BudgetError
from meltcore.common.sizes import size_text
from meltcore.engine.core.waiting import cost_buckets
from meltcore.engine.memory.memory_needs import PlannedEngine, budget_rows, concurrency, weight_element_size
from meltcore.engine.memory.memory_plan import unused
from meltcore.engine.memory.workspace import BATCH_GAPS, LEAST_BATCH_GAP_BYTES, LIBRARY_BYTES, graph_node_bytes
from meltcore.models.checkpoints.checkpoint import Checkpoint
from meltcore.models.configs.task_configs import IndicF5Config
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection
from meltcore.text.synthesis.chunks import MAX_SPEECH_S
from meltcore.text.synthesis.vocabulary import load_vocabulary

# The largest number of frames of one batch. Larger batches are not faster on a GPU, and delay the next utterance.
MAX_BATCH_FRAMES = {"cuda": 8192, "cpu": 4096}
# The largest number of frames of all requests that have begun.
MAX_SYNTHESIS_COST = {"cuda": 262_144, "cpu": 32_768}
# Sizes of tensors that live together in a layer, in units of the hidden size, besides those of the feed-forward; and in
# the vocoder, in units of its sizes and of the transform. Guidance computes every frame twice.
_SPEECH_TENSORS, _VOCODER_TENSORS, _SPECTRUM_TENSORS = 12, 4, 8
_GUIDANCE_ROWS = 2
# The frames of the longest step that is a CUDA graph, and the number of graphs. A longer step keeps a GPU busy for
# longer than its launches take. BUDGET_GRAPHS are the same two numbers for an engine with a budget in bytes.
GRAPHS, BUDGET_GRAPHS = (4096, 8), (2048, 4)
# The fraction of memory for workspaces of libraries and fragmentation. An engine on a GPU with a budget in bytes
# computes these two instead.
_RESERVE = 0.1


def max_speech_s(config: IndicF5Config) -> float:
    """Return the length in seconds of the longest chunk of speech, including the reference audio."""
    return min(MAX_SPEECH_S, (config.max_frames - 2) * config.mel.hop / config.mel.sample_rate)


def synthesis_shape(config: IndicF5Config) -> int:
    """Return the number of frames to which the longest chunk is padded."""
    longest = config.mel.frames(int(max_speech_s(config) * config.mel.sample_rate)) + 1
    return next(bucket for bucket in cost_buckets(2 * longest) if bucket >= longest)


def plan_synthesis(
    config: IndicF5Config,
    *,
    weight_bytes: int,
    element_size: int,
    memory_bytes: int,
    max_shape: int,
    limits: tuple[int, int],
    has_graphs: bool = False,
    is_exact: bool = False,
) -> tuple[int, int, list[MemoryRow]]:
    """Return the frames of a batch, the frames of all requests that have begun, and the memory table.

    The longest chunk is padded to `max_shape` frames. `limits` are the upper bounds of the two numbers of frames. With
    `is_exact` the engine has a budget on a GPU, and its workspace is computed instead of a fraction. Raises BudgetError
    if `memory_bytes` are not enough for the longest chunk.
    """
    layer = _GUIDANCE_ROWS * (_SPEECH_TENSORS * config.hidden_size + 2 * config.feed_forward_size) * element_size
    text = _GUIDANCE_ROWS * (4 * config.text_size + 3 * config.text_feed_forward_size) * element_size
    vocoder_sizes = config.vocoder.hidden_size + config.vocoder.intermediate_size
    vocoder = (_VOCODER_TENSORS * vocoder_sizes + _SPECTRUM_TENSORS * config.mel.n_fft) * 4
    # A mask of float values per pair of frames, which some attention kernels make.
    frame_bytes = max(layer, text, vocoder) + _GUIDANCE_ROWS * max_shape * 4
    # Noise, reference and their padded copies in float32, and what the input layer adds in every step.
    state_bytes = 4 * config.mel.num_mels * 4 + _GUIDANCE_ROWS * config.hidden_size * element_size
    # Graphs share the memory of their activations; each has inputs of its own.
    graph_frames, num_graphs = BUDGET_GRAPHS if is_exact else GRAPHS
    graph_bytes = graph_frames * (layer + num_graphs * state_bytes) if has_graphs else 0
    workspace, factor = 0, 1 - _RESERVE
    if is_exact:
        workspace = LIBRARY_BYTES + LEAST_BATCH_GAP_BYTES + graph_node_bytes(num_graphs, config.num_layers)
        frame_bytes, factor = int(frame_bytes * (1 + BATCH_GAPS)), 1.0
    available_bytes = int(memory_bytes * factor) - weight_bytes - graph_bytes - workspace
    max_batch_frames = min(limits[0], available_bytes // (frame_bytes + state_bytes))
    if max_batch_frames < max_shape:
        least_bytes = weight_bytes + graph_bytes + workspace + max_shape * (frame_bytes + state_bytes)
        needed_bytes = least_bytes / factor
        raise BudgetError(
            f"{size_text(memory_bytes)} must hold the weights and {MAX_SPEECH_S:g} s of speech, which take "
            f"{size_text(needed_bytes)}. Raise --memory."
        )
    max_cost = min(limits[1], (available_bytes - max_batch_frames * frame_bytes) // state_bytes)
    seconds = config.mel.hop / config.mel.sample_rate
    return (
        max_batch_frames,
        max_cost,
        [
            MemoryRow("weights", weight_bytes),
            MemoryRow(
                "activations", max_batch_frames * frame_bytes, f"of {max_batch_frames * seconds:,.0f} s per batch"
            ),
            MemoryRow("requests", max_cost * state_bytes, f"of {max_cost * seconds:,.0f} s with their references"),
            *([MemoryRow("CUDA graphs", graph_bytes, f"{graph_frames} frames per step")] if has_graphs else []),
            *([MemoryRow("workspace", workspace, "of graphs and libraries")] if workspace else []),
        ],
    )


def synthesis_needs(
    model: ModelSection, checkpoint: Checkpoint, on_cpu: bool, source: str, weight_bytes: int
) -> PlannedEngine:
    """Return the memory that an engine of a model needs. `source` says where the sizes were read."""
    vocabulary = load_vocabulary(checkpoint, is_dummy=True)
    config = IndicF5Config.read(checkpoint.config, vocabulary.size)
    element_size, device = weight_element_size(model, on_cpu), "cpu" if on_cpu else "cuda"
    max_shape = synthesis_shape(config)
    limits = MAX_BATCH_FRAMES[device], MAX_SYNTHESIS_COST[device]
    texts = min(concurrency(model), math.ceil(limits[0] / max_shape))
    frames = min(limits[0], texts * max_shape)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        sizes: dict[str, Any] = {"weight_bytes": weight_bytes, "element_size": element_size, "max_shape": max_shape}
        batch, cost, rows = plan_synthesis(
            config, memory_bytes=memory_bytes, limits=limits, has_graphs=not on_cpu, is_exact=not on_cpu, **sizes
        )
        return batch >= frames and cost >= frames, [*rows, unused(memory_bytes, rows)]

    budget, rows = budget_rows(model, divide)
    return PlannedEngine(model.task, budget, rows, None, texts, source)
