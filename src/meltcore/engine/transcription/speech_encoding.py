"""Encodes clips of speech.

On a GPU a batch of few clips is a CUDA graph, since its kernels are shorter than launches.
"""

from __future__ import annotations

import torch

from meltcore.kernels.graph_capture import GraphCache, GraphCapturer
from meltcore.models.tasks.indicconformer import IndicConformer

_INT16_RANGE = 32_768
_Graph = tuple[torch.Tensor, torch.Tensor, torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]


def encode_samples(
    model: IndicConformer, samples: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode clips.

    Args:
        model: the model.
        samples: [clips, samples] int16.
        lengths: [clips] int64, the number of samples of each clip.

    Returns [clips, encoded frames, hidden_size] and the clips' encoded frame counts [clips] int64.
    """
    return model.encode(samples.float() / _INT16_RANGE, lengths)


class EncoderGraphs:
    """CUDA graphs of `encode_samples` for few clips, by the shape of the batch."""

    def __init__(self, model: IndicConformer, limit: int = 32, max_clips: int = 4) -> None:
        """Keep `limit` graphs of at most `max_clips` clips.

        More clips keep a GPU busy for longer than their launches take.
        """
        self._model, self._max_clips = model, max_clips
        self._cache: GraphCache[_Graph] = GraphCache(limit)

    def encode(self, samples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode as `encode_samples` does. The next batch of the same shape overwrites the result."""
        if len(samples) > self._max_clips:
            return encode_samples(self._model, samples, lengths)

        def make(capturer: GraphCapturer) -> _Graph:
            inputs = samples.clone(), lengths.clone()
            encode_samples(self._model, *inputs)  # so that nothing is loaded or chosen during the capture
            torch.cuda.synchronize()
            return *inputs, *capturer.capture(lambda: encode_samples(self._model, *inputs))

        own_samples, own_lengths, graph, encoded = self._cache.get(samples.shape, make)
        own_samples.copy_(samples)
        own_lengths.copy_(lengths)
        graph.replay()
        return encoded
