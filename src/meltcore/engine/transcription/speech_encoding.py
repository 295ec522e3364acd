"""Encodes clips of speech.

On a GPU a batch of few clips is a CUDA graph, since its kernels are shorter than launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.kernels.memory_pools import free_cached_memory, memory_pool
from meltcore.models.tasks.indicconformer import IndicConformer

_INT16_RANGE = 32_768


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
    """CUDA graphs of `encode_samples` for few clips. A batch is padded to a number of clips and of encoder frames."""

    def __init__(self, model: IndicConformer, shapes: Sequence[tuple[int, int]]) -> None:
        """Allocate the inputs of graphs of these shapes, (clips, encoder frames).

        Until `capture` is called, and in other shapes, batches are computed kernel by kernel.
        """
        self._model, self._shapes = model, shapes
        features, factor = model.config.features, model.config.encoder.subsampling_factor
        # Samples of the longest clip of a number of encoder frames
        self._sizes = [size * factor * features.hop - (0 if features.drops_last_frame else 1) for _, size in shapes]
        most = max(clips * size for (clips, _), size in zip(shapes, self._sizes, strict=True))
        with memory_pool("graphs"):
            self._samples = torch.zeros(most, dtype=torch.int16, device=model.device)
            self._lengths = torch.zeros(max(clips for clips, _ in shapes), dtype=torch.int64, device=model.device)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, tuple[torch.Tensor, torch.Tensor]]] = {}

    @torch.inference_mode()
    def capture(self, capturer: GraphCapturer, progress: Callable[[str, float], None]) -> None:
        """Run all shapes, then capture their graphs, the largest first, so that the others fit into its memory."""
        indices = sorted(range(len(self._shapes)), key=lambda index: -self._shapes[index][0] * self._sizes[index])
        for index in indices:
            self._inputs(index)[1].fill_(self._model.config.features.min_samples)
            self._compute(index)
        if self._samples.is_cuda:
            torch.cuda.synchronize()
        free_cached_memory(self._samples.device)  # the memory of these runs belongs to the graphs
        for count, index in enumerate(indices):
            self._graphs[index] = capturer.capture(partial(self._compute, index))
            progress("capturing graphs", (count + 1) / len(indices))

    def encode(self, samples: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Encode as `encode_samples` does. The next batch overwrites the result."""
        clips, size = samples.shape
        fits = (i for i in self._graphs if self._shapes[i][0] >= clips and self._sizes[i] >= size)
        index = min(fits, key=lambda i: self._shapes[i][0] * self._sizes[i], default=None)
        if index is None:
            return encode_samples(self._model, samples, lengths)
        graph, (encoded, frames) = self._graphs[index]
        own_samples, own_lengths = self._inputs(index)
        own_samples[:clips, :size].copy_(samples)
        own_lengths.fill_(self._model.config.features.min_samples)
        own_lengths[:clips].copy_(lengths)
        graph.replay()
        return encoded[:clips, : self._model.encoded_frames(size)], frames[:clips]

    def _inputs(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples and the lengths of a shape."""
        clips, size = self._shapes[index][0], self._sizes[index]
        return self._samples[: clips * size].view(clips, size), self._lengths[:clips]

    def _compute(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return encode_samples(self._model, *self._inputs(index))
