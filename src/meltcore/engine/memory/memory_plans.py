"""Computes the memory of translation, transcription and synthesis engines from sizes and counts.

No torch: `meltcore plan` calls these functions without a GPU, and the engines call the same ones at their start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from meltcore.common.errors import ConfigError
from meltcore.common.sizes import size_text
from meltcore.engine.core.waiting import shape_buckets
from meltcore.engine.memory.workspace import GRAPH_LAYER_BYTES, LIBRARY_BYTES
from meltcore.models.configs.task_configs import (
    BUDGET_SYNTHESIS_GRAPHS,
    MAX_SUBSAMPLING_ELEMENTS,
    SYNTHESIS_GRAPHS,
    IndicConformerConfig,
    IndicF5Config,
    IndicTrans2Config,
    graph_rows,
)
from meltcore.protocol.shell import MemoryRow
from meltcore.text.synthesis.chunks import MAX_SPEECH_S

# Sentences that are decoded together at most. More do not make a device faster, and delay what arrives meanwhile.
MAX_SLOTS = {"cuda": 1024, "cpu": 32}
# Trained on 5 to 25 s. Up to 45 s its results are good; the published encoder cuts off at 240 s.
MAX_CLIP_S = 45
# Encoder frames of the batches that run together. More do not make a GPU faster, and delay what arrives meanwhile.
MAX_TRANSCRIPTION_COST = {"cuda": 32_768, "cpu": 4096}
# Frames of one batch: more do not make a GPU faster, and delay what is due next. Of all requests that have begun.
MAX_BATCH_FRAMES = {"cuda": 8192, "cpu": 4096}
MAX_SYNTHESIS_COST = {"cuda": 262_144, "cpu": 32_768}
# Sizes of tensors that live together in a layer, in units of the hidden size, besides those of the feed-forward; and in
# the vocoder, in units of its sizes and of the transform. Guidance computes every frame twice.
_SPEECH_TENSORS, _VOCODER_TENSORS, _SPECTRUM_TENSORS = 12, 4, 8
_GUIDED = 2
# For workspaces of libraries and fragmentation; of translation also for activations of the encoder. An engine with a
# budget in bytes on a GPU computes them instead.
_TRANSLATION_RESERVE, _TRANSCRIPTION_RESERVE, _SYNTHESIS_RESERVE = 0.15, 0.08, 0.1
# Tensors of one layer of the subsampling that live together: before and after the activation, and the next one's.
_SUBSAMPLING_TENSORS = 2.25
# Sizes that a layer's tensors have together, in units of the hidden and feed-forward sizes, and of attention scores.
_HIDDEN_TENSORS, _FEED_FORWARD_TENSORS, _SCORE_TENSORS = 10, 2, 5
# Gaps of the allocator in an exact plan: a fraction of what lives for one step, and at least this much.
_GAPS, _LEAST_GAP_BYTES = 0.1, 32 * 2**20
# Source tokens that a translation engine with a budget encodes together.
BUDGET_ENCODER_TOKENS = 1024


class TranscriptionGraphs(NamedTuple):
    """How many CUDA graphs of the encoder and of the RNN-T are kept, and the clips that an encoder graph has at most.

    More clips keep a GPU busy for longer than their launches take. subsampling: elements of a layer of the convolutions
    that are computed together.
    """

    encoder: int
    transducer: int
    clips: int
    subsampling: int = MAX_SUBSAMPLING_ELEMENTS


TRANSCRIPTION_GRAPHS = TranscriptionGraphs(32, 16, 4)
# Clips of the longest kind in a loop of the RNN-T that a graph is planned for.
MAX_LOOP_CLIPS = 16
BUDGET_TRANSCRIPTION_GRAPHS = TranscriptionGraphs(4, 4, 2, 2**25)


def graph_node_bytes(num_graphs: int, layers: int) -> int:
    """Return what CUDA graphs of a model of `layers` take of the device outside of torch's allocator."""
    return num_graphs * layers * GRAPH_LAYER_BYTES


def translation_workspace(config: IndicTrans2Config, element_size: int, slots: int, *, num_beams: int) -> int:
    """Return the bytes beside weights and slots of an engine with a budget on a GPU.

    They are activations of the encoder, a step that runs before its graph is captured, graphs, and libraries.
    """
    hidden, ffn = config.hidden_size, max(config.encoder.ffn_size, config.decoder.ffn_size)
    # Hidden states, norm, three projections, attended values and output; the feed-forward before and after activation;
    # keys and values for one layer of the decoder, as projected and as copied.
    encoder = BUDGET_ENCODER_TOKENS * (8 * hidden + 2 * ffn + 4 * hidden) * element_size
    step = slots * num_beams * (config.decoder.vocab_size * (element_size + 4) + (12 * hidden + 2 * ffn) * element_size)
    nodes = graph_node_bytes(len(graph_rows(slots)), config.decoder.num_layers)
    gaps = max(_LEAST_GAP_BYTES, int((encoder + step) * _GAPS))
    tables = (config.max_source_positions + config.max_target_positions + 2) * hidden * element_size
    return encoder + step + nodes + gaps + tables + LIBRARY_BYTES


def plan_slots(
    weight_bytes: int,
    slot_bytes: int,
    memory_bytes: int,
    limit: int,
    workspace: Callable[[int], int] | None = None,
) -> int:
    """Return the number of slots that memory_bytes hold beside the weights and the spare slot, at most `limit`.

    workspace: returns the bytes that a number of slots needs, for an engine with a budget on a GPU. Others reserve a
    fraction. Raises ConfigError when there is not memory for one slot.
    """
    if workspace is None:
        slots = min(limit, (int(memory_bytes * (1 - _TRANSLATION_RESERVE)) - weight_bytes) // slot_bytes - 1)
        needed_bytes = (weight_bytes + 2 * slot_bytes) / (1 - _TRANSLATION_RESERVE)
    else:
        slots = min(limit, (memory_bytes - weight_bytes - workspace(1)) // slot_bytes - 1)
        while slots > 1 and weight_bytes + (slots + 1) * slot_bytes + workspace(slots) > memory_bytes:
            slots -= 1
        needed_bytes = weight_bytes + 2 * slot_bytes + workspace(1)
    if slots < 1:
        raise ConfigError(
            f"{size_text(memory_bytes)} must hold the weights, a slot for one sentence and a spare one: "
            f"{size_text(needed_bytes)}. Raise --memory."
        )
    return slots


def transcription_shape(config: IndicConformerConfig) -> int:
    """Return the encoder frames that the longest clip is padded to."""
    samples = MAX_CLIP_S * config.features.sample_rate
    longest = config.encoder.encoded_frames(config.features.frames(samples))
    return next(shape for shape in shape_buckets(2 * longest) if shape >= longest)


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
    """Return the padded encoder frames that may run together, at most `limit`, and the memory table.

    max_shape: frames that the longest clip is padded to. graphs: the graphs of an engine with a budget on a GPU, whose
    workspace is computed; without them it is a fraction. Raises ConfigError when memory_bytes do not suffice for the
    longest clip.
    """
    encoder = config.encoder
    position_bytes = encoder.num_layers * (2 * max_shape - 1) * encoder.hidden_size * element_size
    frame_bytes, subsampled_bytes, part_bytes = _transcription_sizes(config, element_size, max_shape, graphs)
    workspace, factor = 0, 1 - _TRANSCRIPTION_RESERVE
    if graphs is not None:
        workspace, factor = _transcription_workspace(config, element_size, max_shape, graphs), 1.0
        # What batches need is freed and allocated in other sizes.
        frame_bytes = int(frame_bytes * (1 + _GAPS))
    available_bytes = int(memory_bytes * factor) - weight_bytes - position_bytes - workspace
    # All frames are subsampled together, or a part of them at a time.
    max_cost = available_bytes // (frame_bytes + subsampled_bytes)
    max_cost = min(limit, max(max_cost, (available_bytes - part_bytes) // frame_bytes))
    convolutions = min(part_bytes, max_cost * subsampled_bytes)
    if max_cost < max_shape:
        convolutions = min(part_bytes, max_shape * subsampled_bytes)
        needed_bytes = (weight_bytes + position_bytes + workspace + convolutions + max_shape * frame_bytes) / factor
        raise ConfigError(
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
    """Return the bytes of an encoder frame, what subsampling adds to it, and what it adds for a part of a batch."""
    encoder, features = config.encoder, config.features
    layer = (
        _HIDDEN_TENSORS * encoder.hidden_size
        + _FEED_FORWARD_TENSORS * encoder.feed_forward_size
        + _SCORE_TENSORS * encoder.num_heads * max_shape
    ) * element_size
    # Before the layers, in float32: samples, their windows and the transform. Then the features alone.
    transform = encoder.subsampling_factor * (features.hop * 3 + features.n_fft * 4) * 4
    # Samples and encoded frames live beside, and the tables of the RNN-T.
    beside = (
        encoder.subsampling_factor * features.hop * 2 + 2 * (encoder.hidden_size + config.joint_size) * element_size
    )
    elements = encoder.subsampling_channels * encoder.subsampling_factor * encoder.num_mels // 4
    part = max((graphs or TRANSCRIPTION_GRAPHS).subsampling, elements * max_shape)
    frame_bytes = max(layer, transform) + beside + _loop_frame_bytes(config)
    subsampled_bytes, part_bytes = (int(each * _SUBSAMPLING_TENSORS) * element_size for each in (elements, part))
    return frame_bytes, subsampled_bytes, part_bytes


def _loop_frame_bytes(config: IndicConformerConfig) -> int:
    """Return the bytes of a frame in the tables of the RNN-T: a blank, and a token with its place and probability."""
    return 4 + 12 * config.max_symbols


def _transcription_workspace(
    config: IndicConformerConfig, element_size: int, max_shape: int, graphs: TranscriptionGraphs
) -> int:
    """Return the bytes of graphs with their inputs, and of libraries."""
    encoder = config.encoder
    frame_bytes, subsampled_bytes, part_bytes = _transcription_sizes(config, element_size, max_shape, graphs)
    frames = graphs.clips * max_shape
    pool = frames * frame_bytes + min(part_bytes, frames * subsampled_bytes)
    kept = frames * (encoder.hidden_size * element_size + encoder.subsampling_factor * config.features.hop * 2)
    kept += graph_node_bytes(1, encoder.num_layers)
    # Tables of the RNN-T, and the kernels of its iterations: about those of as many layers as the encoder's.
    loop = MAX_LOOP_CLIPS * max_shape * (config.joint_size * element_size + _loop_frame_bytes(config))
    loop += graph_node_bytes(1, encoder.num_layers)
    return pool + graphs.encoder * kept + graphs.transducer * loop + LIBRARY_BYTES + _LEAST_GAP_BYTES


def max_speech_s(config: IndicF5Config) -> float:
    """Return the seconds of the longest chunk with its reference."""
    return min(MAX_SPEECH_S, (config.max_frames - 2) * config.mel.hop / config.mel.sample_rate)


def synthesis_shape(config: IndicF5Config) -> int:
    """Return the frames that the longest chunk is padded to."""
    longest = config.mel.frames(int(max_speech_s(config) * config.mel.sample_rate)) + 1
    return next(shape for shape in shape_buckets(2 * longest) if shape >= longest)


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

    max_shape: frames that the longest chunk is padded to; limits: of the two; is_exact: of an engine with a budget on a
    GPU, whose workspace is computed instead of a fraction. Raises ConfigError when memory_bytes do
    not suffice for the longest chunk.
    """
    layer = _GUIDED * (_SPEECH_TENSORS * config.hidden_size + 2 * config.feed_forward_size) * element_size
    text = _GUIDED * (4 * config.text_size + 3 * config.text_feed_forward_size) * element_size
    vocoder_sizes = config.vocoder.hidden_size + config.vocoder.intermediate_size
    vocoder = (_VOCODER_TENSORS * vocoder_sizes + _SPECTRUM_TENSORS * config.mel.n_fft) * 4
    # A mask of float values per pair of frames, which some attention kernels make.
    frame_bytes = max(layer, text, vocoder) + _GUIDED * max_shape * 4
    # Noise, reference and their padded copies in float32, and what the input layer adds in every step.
    state_bytes = 4 * config.mel.num_mels * 4 + _GUIDED * config.hidden_size * element_size
    # Graphs share the memory of their activations; each has inputs of its own.
    graph_frames, num_graphs = BUDGET_SYNTHESIS_GRAPHS if is_exact else SYNTHESIS_GRAPHS
    graph_bytes = graph_frames * (layer + num_graphs * state_bytes) if has_graphs else 0
    workspace, factor = 0, 1 - _SYNTHESIS_RESERVE
    if is_exact:
        workspace = LIBRARY_BYTES + _LEAST_GAP_BYTES + graph_node_bytes(num_graphs, config.num_layers)
        frame_bytes, factor = int(frame_bytes * (1 + _GAPS)), 1.0
    available_bytes = int(memory_bytes * factor) - weight_bytes - graph_bytes - workspace
    max_batch_frames = min(limits[0], available_bytes // (frame_bytes + state_bytes))
    if max_batch_frames < max_shape:
        least_bytes = weight_bytes + graph_bytes + workspace + max_shape * (frame_bytes + state_bytes)
        needed_bytes = least_bytes / factor
        raise ConfigError(
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
