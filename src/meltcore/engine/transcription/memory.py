"""Computes the memory of a transcription engine: weights, batches and, with a budget on a GPU, CUDA graphs.

This module does not import torch: `meltcore plan` calls these functions without a GPU, and the engine calls them at its
start.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from meltcore.common.errors import BudgetError, ConfigError
from meltcore.common.sizes import size_text
from meltcore.engine.core.waiting import cost_buckets
from meltcore.engine.memory.memory_needs import (
    PlannedEngine,
    UnknownSizesError,
    budget_rows,
    concurrency,
    weight_element_size,
)
from meltcore.engine.memory.memory_plan import unused
from meltcore.engine.memory.workspace import BATCH_GAPS, LEAST_BATCH_GAP_BYTES, LIBRARY_BYTES, graph_node_bytes
from meltcore.models.checkpoints.checkpoint import find_transcriber
from meltcore.models.configs.nemo_config import CONFIG_FILE, parse_yaml, read_config
from meltcore.models.configs.task_configs import MAX_SUBSAMPLING_ELEMENTS, IndicConformerConfig
from meltcore.protocol.shell import MemoryRow
from meltcore.settings.fleet_spec import ModelSection

# Trained on 5 to 25 s. Up to 45 s its results are good; the published encoder cuts off at 240 s.
MAX_CLIP_S = 45
# Encoder frames of the batches that run together. More do not make a GPU faster, and delay what arrives meanwhile.
MAX_TRANSCRIPTION_COST = {"cuda": 32_768, "cpu": 4096}
_PLANNED_CLIP_S = 30  # of a clip to plan for
# For workspaces of libraries and fragmentation. An engine with a budget in bytes on a GPU computes them instead.
_RESERVE = 0.08
# Tensors of one layer of the subsampling that live together: before and after the activation, and the next one's.
_SUBSAMPLING_TENSORS = 2.25
# Sizes that a layer's tensors have together, in units of the hidden and feed-forward sizes, and of attention scores.
_HIDDEN_TENSORS, _FEED_FORWARD_TENSORS, _SCORE_TENSORS = 10, 2, 5


# Frames of the smallest graph of the encoder, 5 s. The weights take longer to read than these frames to compute.
_FIRST_FRAMES = 64


class TranscriptionGraphs(NamedTuple):
    """The CUDA graphs of an engine.

    Args:
        clips: the numbers of clips of graphs that are captured before serving, of the encoder and of the RNN-T.
        frames: the encoder frames of the encoder's largest graph. More keep a GPU busy for longer than their launches.
        transducer: the number of graphs of the RNN-T for more clips.
        subsampling: the number of elements of a convolution layer that are computed together.
    """

    clips: tuple[int, ...]
    frames: int
    transducer: int
    subsampling: int = MAX_SUBSAMPLING_ELEMENTS

    def encoder_shapes(self, max_shape: int) -> list[tuple[int, int]]:
        """Return the clips and encoder frames of the encoder's graphs. The longest clip has `max_shape` frames."""
        sizes = cost_buckets(max_shape, first=_FIRST_FRAMES, per_doubling=1)
        most = max(self.frames, max_shape)
        return [(clips, size) for clips in self.clips for size in sizes if clips * size <= most]


TRANSCRIPTION_GRAPHS = TranscriptionGraphs((1, 2, 4, 8, 16, 32), 4096, 16)
BUDGET_TRANSCRIPTION_GRAPHS = TranscriptionGraphs((1, 4, 16), 1280, 1, 2**25)


def transcription_shape(config: IndicConformerConfig) -> int:
    """Return the encoder frames to which the longest clip is padded."""
    samples = MAX_CLIP_S * config.features.sample_rate
    longest = config.encoder.encoded_frames(config.features.frames(samples))
    return next(bucket for bucket in cost_buckets(2 * longest) if bucket >= longest)


def plan_transcription(
    config: IndicConformerConfig,
    *,
    weight_bytes: int,
    element_size: int,
    memory_bytes: int,
    max_shape: int,
    limit: int,
    graphs: TranscriptionGraphs | None = None,
) -> tuple[int, list[MemoryRow]]:
    """Return the maximum number of padded encoder frames that run together, at most `limit`, and the memory table.

    The longest clip is padded to `max_shape` frames. `graphs` are the graphs of an engine with a budget on a GPU, whose
    workspace is computed. If `graphs` is None, the workspace is a fraction. Raises BudgetError if `memory_bytes` are
    not enough for the longest clip.
    """
    encoder = config.encoder
    position_bytes = encoder.num_layers * (2 * max_shape - 1) * encoder.hidden_size * element_size
    frame_bytes, subsampled_bytes, part_bytes = _transcription_sizes(config, element_size, max_shape, graphs)
    workspace, factor = 0, 1 - _RESERVE
    if graphs is not None:
        workspace, factor = _transcription_workspace(config, element_size, max_shape, graphs), 1.0
        # What batches need is freed and allocated in other sizes.
        frame_bytes = int(frame_bytes * (1 + BATCH_GAPS))
    available_bytes = int(memory_bytes * factor) - weight_bytes - position_bytes - workspace
    # All frames are subsampled together, or a part of them at a time.
    max_cost = available_bytes // (frame_bytes + subsampled_bytes)
    max_cost = min(limit, max(max_cost, (available_bytes - part_bytes) // frame_bytes))
    convolutions = min(part_bytes, max_cost * subsampled_bytes)
    if max_cost < max_shape:
        convolutions = min(part_bytes, max_shape * subsampled_bytes)
        needed_bytes = (weight_bytes + position_bytes + workspace + convolutions + max_shape * frame_bytes) / factor
        raise BudgetError(
            f"{size_text(memory_bytes)} must hold the weights and a clip of {MAX_CLIP_S} s, which take "
            f"{size_text(needed_bytes)}. Raise --memory."
        )
    return max_cost, [
        MemoryRow("weights", weight_bytes),
        MemoryRow("relative positions", position_bytes, f"of clips of up to {MAX_CLIP_S} s"),
        MemoryRow("activations", max_cost * frame_bytes, f"of {max_cost * config.frame_s:,.0f} s of audio per batch"),
        MemoryRow("convolutions", convolutions, "that shorten the features"),
        *([MemoryRow("workspace", workspace, "of graphs and libraries")] if workspace else []),
    ]


def _transcription_sizes(
    config: IndicConformerConfig, element_size: int, max_shape: int, graphs: TranscriptionGraphs | None
) -> tuple[int, int, int]:
    """Return the bytes of an encoder frame, of its subsampling, and of the subsampling of a part of a batch."""
    encoder, features = config.encoder, config.features
    layer = (
        _HIDDEN_TENSORS * encoder.hidden_size
        + _FEED_FORWARD_TENSORS * encoder.feed_forward_size
        + _SCORE_TENSORS * encoder.num_heads * max_shape
    ) * element_size
    # Before the layers, in float32: samples, their windows and the transform. Then the features alone.
    transform = encoder.subsampling_factor * (features.hop * 3 + features.n_fft * 4) * 4
    # Samples and encoded frames live beside, and the tables of the RNN-T.
    io_bytes = (
        encoder.subsampling_factor * features.hop * 2 + 2 * (encoder.hidden_size + config.joint_size) * element_size
    )
    elements = encoder.subsampling_channels * encoder.subsampling_factor * encoder.num_mels // 4
    batch_elements = max((graphs or TRANSCRIPTION_GRAPHS).subsampling, elements * max_shape)
    frame_bytes = max(layer, transform) + io_bytes + _loop_frame_bytes(config)
    subsampled_bytes, part_bytes = (
        int(each * _SUBSAMPLING_TENSORS) * element_size for each in (elements, batch_elements)
    )
    return frame_bytes, subsampled_bytes, part_bytes


def _loop_frame_bytes(config: IndicConformerConfig) -> int:
    """Return the bytes of a frame in the tables of the RNN-T: a blank, and tokens with frame and probability."""
    return 4 + 12 * config.max_symbols


def _transcription_workspace(
    config: IndicConformerConfig, element_size: int, max_shape: int, graphs: TranscriptionGraphs
) -> int:
    """Return the bytes of graphs with their inputs, and of libraries."""
    encoder, shapes = config.encoder, graphs.encoder_shapes(max_shape)
    frame_bytes, subsampled_bytes, part_bytes = _transcription_sizes(config, element_size, max_shape, graphs)
    frames = max(clips * size for clips, size in shapes)
    # The graphs share the memory of their activations and inputs. Each has outputs of its own.
    pool = frames * (frame_bytes + encoder.subsampling_factor * config.features.hop * 2)
    pool += min(part_bytes, frames * subsampled_bytes)
    outputs = sum(clips * size for clips, size in shapes) * encoder.hidden_size * element_size
    # Tables of the RNN-T. More clips are shorter: their tables are counted like the tables of twice as many long ones.
    loop_clips = sum(graphs.clips) + graphs.transducer * 2 * graphs.clips[-1]
    loops = loop_clips * max_shape * (config.joint_size * element_size + _loop_frame_bytes(config))
    return pool + outputs + loops + transcription_graph_bytes(config, graphs) + LIBRARY_BYTES + LEAST_BATCH_GAP_BYTES


def transcription_graph_bytes(config: IndicConformerConfig, graphs: TranscriptionGraphs) -> int:
    """Return the bytes of the graphs that torch does not allocate.

    The iterations of an RNN-T's graph have about as many kernels as the encoder.
    """
    max_shape = transcription_shape(config)
    num_graphs = len(graphs.encoder_shapes(max_shape)) + len(graphs.clips) + graphs.transducer
    return graph_node_bytes(num_graphs, config.encoder.num_layers)


def planned_config(name: str, *, is_dummy: bool) -> IndicConformerConfig:
    """Return the configuration of a checkpoint. Raises UnknownSizesError if only an engine can read the checkpoint."""
    try:
        path = find_transcriber(name, dummy=is_dummy)
    except ConfigError as error:
        raise UnknownSizesError(str(error)) from error
    assert path is not None, "the caller has recognized it"
    if not (path / CONFIG_FILE).is_file():
        raise UnknownSizesError(f"{name}: its sizes are inside {path.name}; name `shapes` to plan without it")
    return read_config(parse_yaml((path / CONFIG_FILE).read_bytes(), path))


def transcription_needs(model: ModelSection, name: str, on_cpu: bool, source: str, weight_bytes: int) -> PlannedEngine:
    """Return the memory of an engine of a model.

    `name` is the model's checkpoint, or the shapes that replace it, and `source` says which of the two.
    """
    config = planned_config(name, is_dummy=model.load_format == "dummy" or model.shapes is not None)
    element_size, max_shape = weight_element_size(model, on_cpu), transcription_shape(config)
    limit, clip_frames = MAX_TRANSCRIPTION_COST["cpu" if on_cpu else "cuda"], round(_PLANNED_CLIP_S / config.frame_s)
    clips = min(concurrency(model), math.ceil(limit / clip_frames))
    frames = min(limit, clips * clip_frames)

    def divide(memory_bytes: int) -> tuple[bool, list[MemoryRow]]:
        sizes: dict[str, Any] = {"weight_bytes": weight_bytes, "element_size": element_size, "max_shape": max_shape}
        graphs = None if on_cpu else BUDGET_TRANSCRIPTION_GRAPHS
        cost, rows = plan_transcription(config, memory_bytes=memory_bytes, limit=limit, graphs=graphs, **sizes)
        return cost >= frames, [*rows, unused(memory_bytes, rows)]

    budget, rows = budget_rows(model, divide)
    return PlannedEngine(model.task, budget, rows, None, clips, source)
