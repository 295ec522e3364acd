"""Beam search and greedy decoding of an encoder-decoder, for many sources that begin and end at different steps.

Each source has a slot of the tables on the device (`beam_state.py`). On a GPU a step is the replay of one CUDA graph
for the number of running sources, padded. It is launched before the host reads which sources the last step ended.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from meltcore.common.errors import ConfigError, RequestError
from meltcore.engine.memory.graph_sizes import MIN_ROW_TOKENS, packed_sizes
from meltcore.engine.tasks.packed_graphs import PackedGraphs
from meltcore.engine.translation.beam_state import BeamOptions, BeamState
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.kernels.launch import use_triton
from meltcore.models.configs.task_configs import graph_rows
from meltcore.models.tasks.indictrans2 import EOS_ID, IndicTrans2

# Tokens, with padding, that are encoded together at most: they bound the encoder's activations.
_ENCODER_TOKENS = {"cuda": 16_384, "cpu": 2048}
# Tokens of the largest graph of an encoder in 16 bits: a GPU computes more in a longer time than their launches take.
_GRAPH_TOKENS = 2048
# Steps whose inputs and flags are in host memory: one runs while those of the one before are read.
_STEPS_IN_FLIGHT = 2


class Translation(NamedTuple):
    """The best sequence of a source without start and end token, and its log-probability with length penalty."""

    key: Hashable
    token_ids: list[int]
    score: float


@dataclass(eq=False)
class _Sentence:
    """A running source. `is_running` becomes False when the translation is returned or the source is cancelled."""

    key: Hashable
    slot: int
    source_size: int
    begun_step: int
    is_running: bool = True


class _Step(NamedTuple):
    """A launched step. `ended` is host memory, [sentences] bool, which is valid once the event has passed."""

    sentences: list[_Sentence]
    ended: torch.Tensor
    event: torch.cuda.Event | None


class BeamSearch:
    """Decodes sources in slots. `add` fills free slots, and `step` computes one token per beam of all filled slots."""

    def __init__(
        self,
        model: IndicTrans2,
        options: BeamOptions,
        *,
        slots: int,
        max_source: int,
        overlap: bool | None = None,
        graphs: bool | None = None,
        encoder_tokens: int | None = None,
    ) -> None:
        """Allocate the state of `slots` sources of at most `max_source` tokens.

        Args:
            model: the model.
            options: the settings of the search.
            slots: the number of sources that are decoded together.
            max_source: the maximum number of tokens of a source.
            overlap: whether the results of a step are read while the next step runs. None means True on a GPU.
            graphs: whether CUDA graphs are replayed. A graph is captured at its first use or by `capture`. None means
                True on a GPU.
            encoder_tokens: the maximum number of tokens, with padding, that are encoded together. A longer source is
                encoded alone.

        Raises ConfigError if sources or translations have more tokens than the model has positions.
        """
        config = model.config
        for limit, max_positions, name in (
            (max_source, config.max_source_positions, "max_source_positions"),
            (options.max_new_tokens, config.max_target_positions, "max_target_positions"),
        ):
            if limit > max_positions:
                raise ConfigError(f"{limit} tokens are more than the model's {name}, {max_positions}")
        self.model, self.options = model, options
        self.max_source, self.num_slots = max_source, slots
        self._encoder_tokens = encoder_tokens or _ENCODER_TOKENS[model.device.type]
        self.state = BeamState(model, options, slots=slots, max_source=max_source)
        self._is_gpu = model.device.type == "cuda"
        self._overlaps = self._is_gpu if overlap is None else overlap
        has_graphs = self._is_gpu and use_triton(self.state.self_kv) if graphs is None else graphs
        self._capturer = GraphCapturer() if has_graphs else None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._encoder: PackedGraphs | None = None
        if model.is_packed:
            sizes = packed_sizes(max(max_source, min(self._encoder_tokens, _GRAPH_TOKENS)))
            self._encoder = PackedGraphs(self.state.begin_packed, sizes, (3, 2), model.device)
        self._sizes = graph_rows(slots)
        self._free_slots = list(range(slots))
        self._running: dict[int, _Sentence] = {}  # by slot, in the order in which they began
        # The rows of the next step, None until they are needed; and those that the device has
        self._rows: list[_Sentence] | None = None
        self._sent_rows: list[_Sentence] | None = None
        self._limits: deque[int] = deque()  # steps before which sentences have reached their last token
        self._num_steps = 0
        self._launched: _Step | None = None
        # What the host sends and reads
        self._slots = torch.full((self._sizes[-1],), self.state.spare, device=model.device)
        self._host_slots = self._host(_STEPS_IN_FLIGHT, self._sizes[-1], dtype=torch.int64)
        self._ended_buffers = self._host(_STEPS_IN_FLIGHT, self._sizes[-1], dtype=torch.bool)
        make_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
        self._reading = make_stream() if self._is_gpu else None

    @staticmethod
    def slot_bytes(model: IndicTrans2, options: BeamOptions, max_source: int) -> int:
        """Return the bytes of one slot: keys and values, and the logits of a step. A search allocates one more slot."""
        return BeamState.slot_bytes(model, options, max_source)

    @property
    def num_running(self) -> int:
        """The number of filled slots."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """The number of sources that `add` takes now."""
        return len(self._free_slots)

    @torch.inference_mode()
    def capture(self, progress: Callable[[str, float], None] = lambda _stage, _part: None) -> None:
        """Capture the graphs of the encoder and of steps of all sizes, the largest first, which share memory.

        No source may be running. If graphs are off, nothing happens.
        """
        assert not self._running
        if self._capturer is not None:
            if self._encoder is not None:
                self._encoder.capture(self._capturer, progress)
            for index, size in enumerate(reversed(self._sizes)):
                self._graph(size)
                progress("capturing graphs", (index + 1) / len(self._sizes))

    @torch.inference_mode()
    def add(self, keys: Sequence[Hashable], sources: Sequence[Sequence[int]]) -> None:
        """Encode sources and begin to decode them. Source i has the key keys[i], which its translation will have.

        Raises RequestError for an empty or too long source; then no source is added.
        """
        assert len(keys) == len(sources) <= self.num_free
        for source in sources:
            if not 1 <= len(source) <= self.max_source:
                raise RequestError(f"a sentence has {len(source)} tokens; the limit is {self.max_source}")
        sentences = []
        # Short ones first: sources that are encoded together have about one length.
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        max_tokens = self._encoder_tokens
        while order:
            count = max(1, min(len(order), max_tokens // max(MIN_ROW_TOKENS, len(sources[order[-1]]))))
            part, order = order[-count:], order[:-count]
            slots = [self._free_slots.pop() for _ in part]
            self._encode(slots, [sources[i] for i in part])
            sentences += [
                _Sentence(keys[i], slot, len(sources[i]), self._num_steps) for i, slot in zip(part, slots, strict=True)
            ]
        self._running |= {sentence.slot: sentence for sentence in sentences}
        self._limits.append(self._num_steps + self.options.max_new_tokens)
        self._rows = None

    def _encode(self, slots: list[int], sources: list[Sequence[int]]) -> None:
        if self._encoder is not None:
            lengths = np.array([len(source) for source in sources], np.int32)
            distances = self.state.spare - np.array(slots, np.int32)
            positions = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
            token_ids = np.concatenate([np.array(source, np.int32) for source in sources])
            tokens = np.stack([token_ids, positions, distances.repeat(lengths)])
            self._encoder.launch(tokens, np.stack([distances, lengths]), lengths)
            return
        longest = max(map(len, sources))
        # In one array, which one copy brings to the device: the tokens, then slot and length of each
        inputs = self._host(len(sources), longest + 2, dtype=torch.int64)
        for row, slot, source in zip(inputs.numpy(), slots, sources, strict=True):
            row[: len(source)] = source
            row[longest:] = slot, len(source)
        inputs = inputs.to(self.model.device, non_blocking=True)
        self.state.begin(inputs[:, longest], inputs[:, :longest], inputs[:, longest + 1])

    def cancel(self, keys: Iterable[Hashable]) -> None:
        """End sources without a translation. Unknown keys are ignored."""
        unwanted = set(keys)
        for sentence in [sentence for sentence in self._running.values() if sentence.key in unwanted]:
            self._free(sentence)

    @torch.inference_mode()
    def step(self) -> list[Translation]:
        """Compute the next token of every beam. Returns the completed translations, whose slots are now free.

        With overlap these are the translations that the previous step completed.
        """
        if not self._running:
            return []
        launched = self._launch()
        if not self._overlaps:
            return self._take(launched)
        previous, self._launched = self._launched, launched
        return self._take(previous)

    def _launch(self) -> _Step | None:
        """Launch a step of all sentences that are not known to be complete. Returns None without such a sentence."""
        while self._limits and self._limits[0] <= self._num_steps:
            self._limits.popleft()
            self._rows = None
        if self._rows is None:
            last_complete_step = self._num_steps - self.options.max_new_tokens
            self._rows = [sentence for sentence in self._running.values() if sentence.begun_step > last_complete_step]
        rows = self._rows
        if not rows:
            return None
        buffer = self._num_steps % _STEPS_IN_FLIGHT
        size = self._sizes[bisect_left(self._sizes, len(rows))] if self._overlaps else len(rows)
        if rows is not self._sent_rows:
            self._send(self._host_slots[buffer], rows)
        ended = self._compute(size, rows)
        host_ended, event = self._ended_buffers[buffer, : len(rows)], None
        host_ended.copy_(ended[: len(rows)], non_blocking=True)
        if self._is_gpu:
            make_event: Callable[[], torch.cuda.Event] = torch.cuda.Event
            event = make_event()
            event.record()
        self._num_steps += 1
        return _Step(rows, host_ended, event)

    def _send(self, host_slots: torch.Tensor, rows: list[_Sentence]) -> None:
        """Send the slots of a step's rows to the device; the rest is padding."""
        slots = host_slots.numpy()
        slots[: len(rows)] = [sentence.slot for sentence in rows]
        slots[len(rows) :] = self.state.spare
        self._slots.copy_(host_slots, non_blocking=True)
        self._sent_rows = rows

    def _compute(self, size: int, rows: list[_Sentence]) -> torch.Tensor:
        """Compute a step of `size` rows, which begin with `rows`. Returns [size] bool: True for rows that are done."""
        if self._capturer is not None:
            graph, ended = self._graph(size)
            graph.replay()
            return ended
        num_positions = self._num_steps + 1 - next(iter(self._running.values())).begun_step
        return self.state.step(
            self._slots[:size],
            min(num_positions, self.options.max_new_tokens),
            max(sentence.source_size for sentence in rows),
        )

    def _graph(self, size: int) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Return the graph of a size, captured at its first use, and its output."""
        if size not in self._graphs:
            assert self._capturer is not None
            step = partial(self.state.step, self._slots[:size], self.options.max_new_tokens, self.max_source)
            saved_slots = self._slots.clone()
            self._slots.fill_(self.state.spare)
            step()  # compiles, on the spare slot
            self._slots.copy_(saved_slots)
            torch.cuda.synchronize()
            self._graphs[size] = self._capturer.capture(step)
        return self._graphs[size]

    def _take(self, step: _Step | None) -> list[Translation]:
        """Return the translations that a step completed, and free their slots."""
        if step is None:
            return []
        if step.event is not None:
            step.event.synchronize()
        rows = np.flatnonzero(step.ended.numpy()).tolist()
        sentences = [sentence for row in rows if (sentence := step.sentences[row]).is_running]
        if not sentences:
            return []
        # On a stream of its own, so that it does not wait for the step that runs: that leaves these slots as they are.
        with torch.cuda.stream(self._reading) if self._reading is not None else nullcontext():
            slots = self._host(len(sentences), dtype=torch.int64)
            slots.numpy()[:] = [sentence.slot for sentence in sentences]
            tokens, scores = self.state.read(slots.to(self.model.device, non_blocking=True))
        translations = []
        for sentence, token_ids, score in zip(sentences, tokens, scores, strict=True):
            self._free(sentence)
            translations.append(
                Translation(sentence.key, token_ids[:-1] if token_ids[-1] == EOS_ID else token_ids, score)
            )
        return translations

    def _free(self, sentence: _Sentence) -> None:
        sentence.is_running = False
        del self._running[sentence.slot]
        self._free_slots.append(sentence.slot)
        self._rows = None

    def _host(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Return zeros in host memory, which is pinned for a GPU so that copies do not block."""
        return torch.zeros(shape, dtype=dtype, pin_memory=self._is_gpu)
