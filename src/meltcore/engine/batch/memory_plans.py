"""Computes the memory of translation, recognition and synthesis engines from sizes and counts.

No torch: `meltcore plan` calls these functions without a GPU, and the engines call the same ones at their start.
"""

from __future__ import annotations

from meltcore.engine.batch.waiting import shape_buckets
from meltcore.errors import ConfigError
from meltcore.models.task_configs import MAX_GRAPH_FRAMES, MAX_GRAPHS, IndicConformerConfig, IndicF5Config
from meltcore.protocol.shell import MemoryRow
from meltcore.text.synthesis.chunks import MAX_SPEECH_S

# Sentences that are decoded together at most. More do not make a device faster, and delay what arrives meanwhile.
MAX_SLOTS = {"cuda": 1024, "cpu": 32}
# Trained on 5 to 25 s. Up to 45 s its results are good; the published encoder cuts off at 240 s.
MAX_CLIP_S = 45
# Encoder frames of the batches that run together. More do not make a GPU faster, and delay what arrives meanwhile.
MAX_RECOGNITION_COST = {"cuda": 32_768, "cpu": 4096}
# Frames of one batch: more do not make a GPU faster, and delay what is due next. Of all requests that have begun.
MAX_BATCH_FRAMES = {"cuda": 8192, "cpu": 4096}
MAX_SYNTHESIS_COST = {"cuda": 262_144, "cpu": 32_768}
# Sizes of tensors that live together in a layer, in units of the hidden size, besides those of the feed-forward; and in
# the vocoder, in units of its sizes and of the transform. Guidance computes every frame twice.
_SPEECH_TENSORS, _VOCODER_TENSORS, _SPECTRUM_TENSORS = 12, 4, 8
_GUIDED = 2
# For workspaces of libraries and fragmentation; of translation also for activations of the encoder.
_TRANSLATION_RESERVE, _RECOGNITION_RESERVE, _SYNTHESIS_RESERVE = 0.15, 0.08, 0.1
# Tensors of one layer of the subsampling that live together: before and after the activation, and the next one's.
_SUBSAMPLING_TENSORS = 2.25
# Sizes that a layer's tensors have together, in units of the hidden and feed-forward sizes, and of attention scores.
_HIDDEN_TENSORS, _FEED_FORWARD_TENSORS, _SCORE_TENSORS = 10, 2, 5


def plan_slots(weight_bytes: int, slot_bytes: int, memory_bytes: int, limit: int) -> int:
    """Return the number of slots that memory_bytes hold beside the weights and the spare slot, at most `limit`.

    Raises ConfigError when there is not memory for one.
    """
    slots = min(limit, (int(memory_bytes * (1 - _TRANSLATION_RESERVE)) - weight_bytes) // slot_bytes - 1)
    if slots < 1:
        needed_bytes = (weight_bytes + 2 * slot_bytes) / (1 - _TRANSLATION_RESERVE)
        raise ConfigError(
            f"{memory_bytes / 2**20:,.1f} MiB must hold the weights, a slot for one sentence and a spare one: "
            f"{needed_bytes / 2**20:,.1f} MiB. Raise --memory."
        )
    return slots


def recognition_shape(config: IndicConformerConfig) -> int:
    """Return the encoder frames that the longest clip is padded to."""
    samples = MAX_CLIP_S * config.features.sample_rate
    longest = config.encoder.encoded_frames(config.features.frames(samples))
    return next(shape for shape in shape_buckets(2 * longest) if shape >= longest)


def plan_recognition(
    config: IndicConformerConfig,
    *,
    weight_bytes: int,
    element_size: int,
    memory_bytes: int,
    max_shape: int,
    limit: int,
) -> tuple[int, list[MemoryRow]]:
    """Return the padded encoder frames that may run together, at most `limit`, and the memory table.

    max_shape: frames that the longest clip is padded to. Raises ConfigError when memory_bytes do not suffice for it.
    """
    encoder = config.encoder
    position_bytes = encoder.num_layers * (2 * max_shape - 1) * encoder.hidden_size * element_size
    subsampled = encoder.subsampling_factor // 2 * (encoder.num_mels // 2) * encoder.subsampling_channels
    layer = (
        _HIDDEN_TENSORS * encoder.hidden_size
        + _FEED_FORWARD_TENSORS * encoder.feed_forward_size
        + _SCORE_TENSORS * encoder.num_heads * max_shape
    )
    # Samples and features in float32 live beside; tokens of the RNN-T are int32, twice per possible symbol.
    host_copies = encoder.subsampling_factor * (config.features.hop * 3 + config.features.n_fft * 4) * 4
    frame_bytes = (
        int(max(subsampled * _SUBSAMPLING_TENSORS, layer) * element_size) + host_copies + 8 * config.max_symbols
    )
    available_bytes = int(memory_bytes * (1 - _RECOGNITION_RESERVE)) - weight_bytes - position_bytes
    max_cost = min(limit, available_bytes // frame_bytes)
    if max_cost < max_shape:
        needed_bytes = (weight_bytes + position_bytes + max_shape * frame_bytes) / (1 - _RECOGNITION_RESERVE)
        raise ConfigError(
            f"{memory_bytes / 2**30:.2f} GiB must hold the weights and a clip of {MAX_CLIP_S} s, which take "
            f"{needed_bytes / 2**30:.2f} GiB. Raise --memory."
        )
    return max_cost, [
        MemoryRow("weights", weight_bytes),
        MemoryRow("relative positions", position_bytes, f"of clips of up to {MAX_CLIP_S} s"),
        MemoryRow("activations", max_cost * frame_bytes, f"of {max_cost * config.frame_s:,.0f} s of audio per batch"),
    ]


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
) -> tuple[int, int, list[MemoryRow]]:
    """Return the frames of a batch, the frames of all requests that have begun, and the memory table.

    max_shape: frames that the longest chunk is padded to; limits: of the two. Raises ConfigError when memory_bytes do
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
    graph_bytes = MAX_GRAPH_FRAMES * (layer + MAX_GRAPHS * state_bytes) if has_graphs else 0
    available_bytes = int(memory_bytes * (1 - _SYNTHESIS_RESERVE)) - weight_bytes - graph_bytes
    max_batch_frames = min(limits[0], available_bytes // (frame_bytes + state_bytes))
    if max_batch_frames < max_shape:
        least_bytes = weight_bytes + graph_bytes + max_shape * (frame_bytes + state_bytes)
        needed_bytes = least_bytes / (1 - _SYNTHESIS_RESERVE)
        raise ConfigError(
            f"{memory_bytes / 2**20:,.1f} MiB must hold the weights and {MAX_SPEECH_S:g} s of speech, which take "
            f"{needed_bytes / 2**20:,.1f} MiB. Raise --memory."
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
            *([MemoryRow("CUDA graphs", graph_bytes, f"{MAX_GRAPH_FRAMES} frames per step")] if has_graphs else []),
        ],
    )
