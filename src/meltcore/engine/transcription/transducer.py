"""Decodes a batch with a greedy RNN-T by label looping.

The decoder state of a clip changes only with a token. So one iteration computes, for every clip, the logits of several
frames with the same prediction. It takes the first frame whose best token is not the blank, and then advances the
prediction network once for all clips. This is the method of Xu et al., "Label-Looping", 2024, except for the window of
frames. Clips at different positions of their audio share every operation. On a GPU several iterations are one CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from meltcore.engine.core.waiting import cost_buckets
from meltcore.engine.transcription.ctc import Emissions
from meltcore.kernels.graph_capture import GraphCache, GraphCapturer
from meltcore.models.tasks.indicconformer import IndicConformer

# Frames whose logits an iteration computes per clip. Speech has a token every 2 to 4 frames of 80 ms.
WINDOW_FRAMES = 4
# Iterations between two looks at the device for whether all clips have ended.
_GPU_ITERATIONS = 8


class _State(NamedTuple):
    """The decoder state of a batch: the state of the prediction network after the tokens of each clip."""

    predicted: torch.Tensor  # [clips, joint_size]
    hidden: torch.Tensor  # [layers, clips, prediction_size]
    cell: torch.Tensor

    def updated(self, new: _State, rows: torch.Tensor) -> _State:
        """Return a state with the values of `new` for the clips in `rows`, [clips] bool, and of `self` otherwise."""
        return _State(
            torch.where(rows[:, None], new.predicted, self.predicted),
            torch.where(rows[None, :, None], new.hidden, self.hidden),
            torch.where(rows[None, :, None], new.cell, self.cell),
        )


class _Loop:
    """The tables of one batch, which iterations change in place. `load` begins a batch of the same shape."""

    def __init__(self, model: IndicConformer, clips: int, size: int, frames_per_token: int | None) -> None:
        """Allocate the tables of `clips` clips of `size` encoder frames.

        `transducer_greedy` explains frames_per_token.
        """
        self.model, self.size = model, size
        self._frames_per_token = frames_per_token
        self._max_symbols = 1 if frames_per_token else model.config.max_symbols
        config, device = model.config, model.device
        self._window = min(WINDOW_FRAMES, size)
        self._offsets = torch.arange(self._window, device=device)
        self._rows = torch.arange(clips, device=device)
        self._projected = torch.empty(clips, size, config.joint_size, dtype=model.dtype, device=device)
        zeros = self._projected.new_zeros(config.prediction_layers, clips, config.prediction_size)
        self._state = _State(zeros.new_zeros(clips, config.joint_size), zeros, zeros.clone())

        def table(*columns: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.zeros(clips, *columns, dtype=dtype, device=device)

        self._frames, self._languages, self.count = table(), table(), table()
        self._frame, self._symbols = table(), table()  # the frame of each clip, and the tokens that it has there
        # One column more: iterations of a clip that emit nothing write there.
        self._max_tokens = size * self._max_symbols
        self.tokens = table(self._max_tokens + 1, dtype=torch.int32)
        self.places = table(self._max_tokens + 1, dtype=torch.int32)
        self.logprobs = table(self._max_tokens + 1, dtype=torch.float32)
        # Of the blank in each frame, before the first token of the frame. The last column is for all that is not kept.
        self.blank_logprobs = table(size + 1, dtype=torch.float32)
        self.is_running = torch.zeros((), dtype=torch.bool, device=device)

    def load(self, encoded: torch.Tensor, frames: torch.Tensor, languages: torch.Tensor, start: int) -> None:
        """Begin a batch of at most as many clips and frames. `start` is the prediction network's first input."""
        model, (clips, size, _) = self.model, encoded.shape
        for zeroed in (self._frames, self._languages, self._frame, self._symbols, self.count, *self._state):
            zeroed.zero_()
        self._projected[:clips, :size].copy_(model.joint.enc(encoded))
        self._frames[:clips].copy_(frames)
        self._languages[:clips].copy_(languages)
        self._start = start
        self._keep(_advance(model, torch.full_like(self._frames, start), self._state))
        self.is_running.fill_(True)

    def iterate(self, iterations: int) -> None:
        """Run iterations for all clips, and set `is_running` if a clip has frames left."""
        heads = self.model.joint.heads(self._languages)
        for _ in range(iterations):
            self._iterate(heads)
        self.is_running.copy_((self._frame < self._frames).any())

    def _iterate(self, heads: tuple[torch.Tensor, torch.Tensor]) -> None:
        config = self.model.config
        window_frames = self._frame[:, None] + self._offsets
        read = self._projected[self._rows[:, None], window_frames.clamp(max=self.size - 1)]
        logits = self.model.joint(read, self._state.predicted, heads)
        if self._frames_per_token:
            best = logits[..., : config.blank].argmax(-1)
            is_token = window_frames % self._frames_per_token == 0
        else:
            best = logits.argmax(-1)
            is_token = best != config.blank
        is_token &= window_frames < self._frames[:, None]
        logprobs = logits.log_softmax(-1, dtype=torch.float32)
        is_first_visit = (self._offsets > 0) | (self._symbols == 0)[:, None]
        kept_frames = torch.where(is_first_visit, window_frames.clamp(max=self.size), self.size)
        self.blank_logprobs.scatter_(1, kept_frames, logprobs[..., config.blank])
        emits, first = is_token.any(1), is_token.int().argmax(1)
        token = best.gather(1, first[:, None])[:, 0]
        logprob = logprobs[self._rows, first, token]
        # A frame that is left by blanks begins its successor's count; so does one with the most tokens.
        frame = self._frame + torch.where(emits, first, self._window)
        symbols = torch.where(emits, torch.where(first > 0, 1, self._symbols + 1), 0)
        column = torch.where(emits, self.count, self._max_tokens)[:, None]
        self.tokens.scatter_(1, column, token[:, None].int())
        self.places.scatter_(1, column, frame[:, None].int())
        self.logprobs.scatter_(1, column, logprob[:, None])
        self.count += emits
        new = _advance(self.model, torch.where(emits, token, self._start), self._state)
        self._keep(self._state.updated(new, emits))
        is_full = symbols >= self._max_symbols
        # Not far beyond the end, where iterations of longer clips would lead.
        self._frame.copy_((frame + is_full).clamp(max=self.size))
        self._symbols.copy_(symbols.masked_fill(is_full, 0))

    def _keep(self, state: _State) -> None:
        for kept, new in zip(self._state, state, strict=True):
            kept.copy_(new)


class TransducerGraphs:
    """Keeps a `_Loop` for each number of clips, with several of its iterations as a CUDA graph.

    Few clips have loops of the longest kind, which `capture` makes. Loops of more clips are made at their first use.
    """

    def __init__(self, model: IndicConformer, limit: int = 16, frames_per_token: int | None = None) -> None:
        """Keep `limit` loops of many clips. `transducer_greedy` explains frames_per_token."""
        self._model, self._frames_per_token = model, frames_per_token
        self._cache: GraphCache[tuple[_Loop, torch.cuda.CUDAGraph]] = GraphCache(limit)
        self._few: dict[int, tuple[_Loop, torch.cuda.CUDAGraph]] = {}
        # All loops share its memory. The cache would lose its own when another loop takes the place of its only one.
        self._capturer: GraphCapturer | None = None

    @torch.inference_mode()
    def capture(self, capturer: GraphCapturer, clip_counts: Sequence[int], size: int) -> None:
        """Make loops of these numbers of clips, which increase, each of at most `size` encoder frames."""
        self._capturer = capturer
        for clips in reversed(clip_counts):
            self._few[clips] = self._make(capturer, clips, size, self._model.config.vocab_size)
        self._few = dict(sorted(self._few.items()))

    def get(
        self, encoded: torch.Tensor, frames: torch.Tensor, languages: torch.Tensor, start: int
    ) -> tuple[_Loop, torch.cuda.CUDAGraph]:
        """Return a loop that is loaded with these inputs, and the graph of several of its iterations."""
        clips, size, _ = encoded.shape
        kept = next((self._few[count] for count in self._few if count >= clips), None)
        if kept is None or kept[0].size < size or start != self._model.config.vocab_size:
            rounded = next(count for count in cost_buckets(2 * clips, first=1) if count >= clips)
            kept = self._cache.get(
                (rounded, size, start),
                lambda capturer: self._make(self._capturer or capturer, rounded, size, start),
            )
        kept[0].load(encoded, frames, languages, start)
        return kept

    def _make(self, capturer: GraphCapturer, clips: int, size: int, start: int) -> tuple[_Loop, torch.cuda.CUDAGraph]:
        loop, model = _Loop(self._model, clips, size, self._frames_per_token), self._model
        zeros = loop.count.new_zeros(clips)
        encoded = torch.zeros(clips, 1, model.config.encoder.hidden_size, dtype=model.dtype, device=model.device)
        loop.load(encoded, zeros, zeros, start)
        loop.iterate(_GPU_ITERATIONS)  # so that nothing is loaded or chosen during the capture
        if loop.is_running.is_cuda:
            torch.cuda.synchronize()
        return loop, capturer.capture(lambda: loop.iterate(_GPU_ITERATIONS))[0]


def transducer_greedy(
    model: IndicConformer,
    encoded: torch.Tensor,
    frames: torch.Tensor,
    languages: torch.Tensor,
    start_token: int | None = None,
    graphs: TransducerGraphs | None = None,
    frames_per_token: int | None = None,
) -> list[Emissions]:
    """Return each clip's emissions.

    A token spans the frame at which it is emitted, and has the probability of that frame.

    Args:
        model: the model.
        encoded: [clips, frames, hidden_size].
        frames: [clips] int64.
        languages: [clips] int64.
        start_token: the prediction network's first input. None uses the global blank.
        graphs: CUDA graphs of earlier batches, which have their own frames_per_token. None launches every kernel
            separately.
        frames_per_token: a token is emitted in every `frames_per_token`-th frame, whatever the blank's logit. This is
            for random weights, which have no rate of speech.
    """
    start = model.config.vocab_size if start_token is None else start_token
    if graphs is None:
        clips, size = encoded.shape[:2]
        loop = _Loop(model, clips, size, frames_per_token)
        loop.load(encoded, frames, languages, start)
        iterations = 1 if encoded.device.type == "cpu" else _GPU_ITERATIONS
        while bool(loop.is_running):
            loop.iterate(iterations)
    else:
        loop, graph = graphs.get(encoded, frames, languages, start)
        while bool(loop.is_running):
            graph.replay()
    counts = loop.count[: len(frames)].tolist()
    longest = max(counts)
    tokens, places, scores = (each[:, :longest].cpu() for each in (loop.tokens, loop.places, loop.logprobs))
    blanks = loop.blank_logprobs.cpu()
    found = []
    for row, (count, num_frames) in enumerate(zip(counts, frames.tolist(), strict=True)):
        first, end, logprobs = (each[row, :count].tolist() for each in (places, places + 1, scores))
        found.append(Emissions(tokens[row, :count].tolist(), first, end, logprobs, blanks[row, :num_frames].tolist()))
    return found


def _advance(model: IndicConformer, tokens: torch.Tensor, state: _State) -> _State:
    """Feed one token of every clip to the prediction network."""
    output, (hidden, cell) = model.prediction(tokens, (state.hidden, state.cell))
    return _State(model.joint.pred(output), hidden, cell)
