"""Steps with prompts as CUDA graphs, where launching them would take longer than computing them.

Kernel by kernel, a step of 28 layers costs the host 10 to 16 ms whatever it holds, and everyone who decodes beside one
short prompt would wait for it. So a step is padded to the next of a few sizes, and replayed: 1 to 2 ms for a prompt of
a few hundred tokens. Where prompts are so long that the device is the slower one, nothing is gained and nothing padded.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from meltcore.engine.batch import Batch, NewPages, StateStep
from meltcore.engine.graphs import PADDING_POSITION, PADDING_ROW, Captured, Recorder
from meltcore.engine.outbox import Outbox, aligned
from meltcore.kernels.attention import BLOCK_QUERIES
from meltcore.kernels.decode_tables import take_changes
from meltcore.kernels.delta import CHUNK
from meltcore.models.loader import Progress

# In the place of a token that the host does not know yet: the newest of its row is meant.
ON_DEVICE = -1

# Tokens of prompts alone, and beside so many sequences that decode. Closer together where padding costs more. Beyond
# 8,192 an H200 takes longer to compute a step than the host to launch it; several that share a model do not.
ALONE = (
    *(64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072),
    *(3584, 4096, 4608, 5120, 5632, 6144, 7168, 8192, 10240, 12288, 16384),
)
BESIDE = (128, 256, 512, 768, 1024, 2048, 4096, 6144, 8192, 12288, 16384)
DECODES = (16, 64, 128, 256, 512)
# Beside so many, sizes are recorded before anybody is served: who measures a server sends as few requests as these, and
# a size that is first met costs the host two launches of the step, 0.1 s each among four ranks with routed experts.
RECORDED_DECODES = 64
# A graph recorded while serving takes some MiB of what was kept in reserve, and steps need the rest.
LEAST_FREE_BYTES = 2**27


class Size(NamedTuple):
    """What a graph has places for: chunks of one token (`decodes`), and tokens of longer ones."""

    decodes: int
    tokens: int

    @property
    def prompts(self) -> int:
        """Chunks of more than one token: shorter ones than this leave places for tokens empty."""
        return max(4, self.tokens // 64)

    @property
    def segments(self) -> int:
        """Chunks of the step, one of all tokens that are padding, and one of nothing, for places without a piece."""
        return self.decodes + self.prompts + 2

    @property
    def sampled(self) -> int:
        return self.decodes + self.prompts

    @property
    def tiles(self) -> int:
        """Of queries: every prompt may end within one, and the padding."""
        return self.tokens // BLOCK_QUERIES + self.prompts + 1

    @property
    def pieces(self) -> int:
        """Of recurrent layers: every prompt may end within one, and the padding."""
        return self.tokens // CHUNK + self.prompts + 1

    def holds(self, batch: Batch) -> bool:
        tokens, prompts = len(batch.token_ids) - batch.decodes, len(batch.rows) - batch.decodes
        return batch.decodes <= self.decodes and tokens <= self.tokens and prompts <= self.prompts


def prompt_sizes(max_num_seqs: int, most_tokens: int) -> list[Size]:
    """Sizes to capture, ascending by all their tokens: of prompts at most `most_tokens`, at most so many sequences."""
    counts = [count for count in DECODES if count < max_num_seqs]
    if max_num_seqs <= DECODES[-1]:
        counts.append(max_num_seqs)
    sizes = [Size(0, tokens) for tokens in ALONE] + [Size(count, tokens) for count in counts for tokens in BESIDE]
    return sorted((size for size in sizes if size.tokens <= most_tokens), key=sum)


class PaddedInputs(NamedTuple):
    """All that a padded step is told, int64: `decodes` chunks of one token, then the tokens of the others.

    token_ids (ON_DEVICE: the row's newest), positions, token_rows: [decodes + tokens], of each token; tiles:
    [tiles * 2], of queries, two int32 in one; last_tokens, sample_rows: [sampled], which token's logits choose, for
    which row; rows, starts, state_slots: [segments]; first_tokens: [segments + 1]; pieces: [pieces], of recurrent
    layers, two int32 in one (see `Segments`). Padding is the padding row's and the null slot's, which nobody reads;
    it is computed like everything else, since what is left as it was in memory may be no number at all.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    tiles: torch.Tensor
    last_tokens: torch.Tensor
    sample_rows: torch.Tensor
    rows: torch.Tensor
    starts: torch.Tensor
    state_slots: torch.Tensor
    first_tokens: torch.Tensor
    pieces: torch.Tensor

    @classmethod
    def within(cls, entries: torch.Tensor, size: Size) -> PaddedInputs:
        """Views of an array of at least `entries_of(size)`."""
        lengths = _lengths(size)
        starts = np.cumsum([0, *map(aligned, lengths)]).tolist()
        return cls(*(entries[start : start + length] for start, length in zip(starts, lengths, strict=False)))


def entries_of(size: Size) -> int:
    return sum(map(aligned, _lengths(size)))


def _lengths(size: Size) -> list[int]:
    tokens, segments = size.decodes + size.tokens, size.segments
    of_tokens = [tokens, tokens, tokens, 2 * size.tiles, size.sampled, size.sampled]
    return [*of_tokens, segments, segments, segments, segments + 1, size.pieces]


_NO_TOKENS = np.zeros(0, np.int64)
EMPTY = Batch(
    decodes=0,
    tiles=np.zeros((0, 4), np.int32),
    groups=[],
    token_ids=_NO_TOKENS,
    positions=_NO_TOKENS,
    token_rows=_NO_TOKENS,
    places=_NO_TOKENS,
    rows=[],
    starts=[],
    unread_tokens=[],
    unread_rows=[],
    last_tokens=[],
    sample_rows=[],
    states=StateStep([], np.zeros(1, np.int64), np.zeros((0, 2), np.int32), [], []),
)


def pad(batch: Batch, size: Size, inputs: PaddedInputs) -> None:
    """Write a batch that `size` holds into `inputs`, which lie in the host's memory."""
    decodes, gap = batch.decodes, size.decodes - batch.decodes

    def moved(tokens: Sequence[int]) -> np.ndarray:
        """Where these tokens of the batch are: those of longer chunks behind all places for chunks of one."""
        at = np.asarray(tokens, dtype=np.int64)
        return at + gap * (at >= decodes)

    def spread(target: torch.Tensor, given: Sequence[int] | np.ndarray, no_decode: int, nothing: int) -> None:
        _front(target[: size.decodes], given[:decodes], no_decode)
        _front(target[size.decodes :], given[decodes:], nothing)

    spread(inputs.token_ids, batch.token_ids, 0, 0)
    inputs.token_ids.numpy()[moved(batch.unread_tokens)] = ON_DEVICE
    spread(inputs.positions, batch.positions, PADDING_POSITION, 0)
    spread(inputs.token_rows, batch.token_rows, PADDING_ROW, PADDING_ROW)
    unused = _pieces_of(size.tokens - (len(batch.token_ids) - decodes), BLOCK_QUERIES)
    ends = len(batch.token_ids) - decodes + np.cumsum(unused, dtype=np.int32)
    padding = np.stack([np.full_like(unused, PADDING_ROW), ends - unused, unused, np.zeros_like(unused)], 1)
    _front(inputs.tiles, np.concatenate([batch.tiles, padding]).reshape(-1).view(np.int64), 0)
    _front(inputs.last_tokens, moved(batch.last_tokens), 0)
    _front(inputs.sample_rows, batch.sample_rows, PADDING_ROW)
    spread(inputs.rows, batch.rows, PADDING_ROW, PADDING_ROW)
    spread(inputs.starts, batch.starts, PADDING_POSITION, 0)
    if batch.states is not None:
        spread(inputs.state_slots, batch.states.slots, 0, 0)
        _pad_pieces(batch.states, decodes, size, inputs)


def _pad_pieces(step: StateStep, decodes: int, size: Size, inputs: PaddedInputs) -> None:
    gap = size.decodes - decodes
    firsts, pieces = inputs.first_tokens.numpy(), inputs.pieces.numpy()
    ends = step.first_tokens[decodes:] + gap
    firsts[: size.decodes] = np.arange(size.decodes)
    _front(inputs.first_tokens[size.decodes :], ends, ends[-1])
    firsts[-2:] = size.decodes + size.tokens
    unused = len(_pieces_of(int(firsts[-1] - ends[-1]), CHUNK))
    cut = np.zeros((size.pieces, 2), np.int32)
    cut[:, 0] = size.segments - 1
    cut[: len(step.pieces)] = step.pieces + np.array([gap, 0], np.int32)
    padding = cut[len(step.pieces) : len(step.pieces) + unused]
    padding[:, 0], padding[:, 1] = size.segments - 2, np.arange(unused)
    pieces[:] = cut.reshape(-1).view(np.int64)


def _front(target: torch.Tensor, given: Sequence[int] | np.ndarray, nothing: int) -> None:
    """`given`, and `nothing` behind it."""
    array = target.numpy()
    array[: len(given)], array[len(given) :] = given, nothing


def _pieces_of(tokens: int, most: int) -> np.ndarray:
    """Sizes of the pieces of at most `most` that so many tokens are cut into: [pieces] int32."""
    return np.minimum(most, tokens - np.arange(0, tokens, most)).astype(np.int32)


# Inputs of a size on the device. Returns the hidden states of the tokens that choose, [sampled, hidden_size], and the
# greedy tokens [sampled] int64.
PaddedStep = Callable[[PaddedInputs, Size], tuple[torch.Tensor, torch.Tensor]]


class PromptGraphs:
    def __init__(self, step: PaddedStep, sizes: list[Size], page_table: torch.Tensor) -> None:
        """`step` computes eagerly what a replay will. page_table: [rows, pages of a sequence] int64."""
        self._step = step
        self._sizes = sizes
        self._totals = [sum(size) for size in sizes]
        self._page_table = page_table
        most = max(map(entries_of, sizes))
        self._inputs = torch.zeros(most, dtype=torch.int64, device=page_table.device)
        self._outbox = Outbox(2 * most)
        self._recorder = Recorder()
        self._captured: dict[Size, Captured] = {}
        self._room = True

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Record sizes beside few that decode, the largest first, so that the smaller ones fit into the memory it took.

        The others, of which there are more, are recorded when they are first met.
        """
        first = [size for size in reversed(self._sizes) if size.decodes <= RECORDED_DECODES]
        for number, size in enumerate(first):
            nothing = torch.zeros(entries_of(size), dtype=torch.int64)
            pad(EMPTY, size, PaddedInputs.within(nothing, size))
            self._inputs[: len(nothing)] = nothing.to(self._inputs.device)
            inputs = PaddedInputs.within(self._inputs, size)
            self._step(inputs, size)
            torch.cuda.synchronize()
            self._captured[size] = self._recorder.record(partial(self._step, inputs, size))
            progress("capturing graphs of prompts", (number + 1) / len(first))

    def size_for(self, batch: Batch) -> Size | None:
        """The smallest that holds a batch; None where it is left to be launched kernel by kernel."""
        first = bisect_left(self._totals, len(batch.token_ids))
        size = next((size for size in self._sizes[first:] if size.holds(batch)), None)
        if size is None or size in self._captured or self._has_room():
            return size
        return None

    def replay(self, batch: Batch, size: Size, new_pages: NewPages) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step after `new_pages` are in the table. Returns the hidden states and greedy tokens of those that
        choose, overwritten by the next replay of this size."""
        entries, added = entries_of(size), len(new_pages.rows)
        sent, read = self._outbox.take(entries + 3 * added)
        pad(batch, size, PaddedInputs.within(sent, size))
        sent.numpy()[entries:] = [*new_pages.rows, *new_pages.columns, *new_pages.pages]
        take_changes(sent, self._inputs[:entries], self._page_table, added)
        read.record()
        captured = self._captured.get(size)
        if captured is None:
            inputs = PaddedInputs.within(self._inputs, size)
            hidden, token_ids = self._step(inputs, size)
            self._captured[size] = self._recorder.record(partial(self._step, inputs, size))
        else:
            captured.graph.replay()
            hidden, token_ids = captured.values, captured.token_ids
        count = len(batch.last_tokens)
        return hidden[:count], token_ids[:count]

    def _has_room(self) -> bool:
        """Whether memory is left for one more graph; from the first time that it is not, none is recorded."""
        if self._room and torch.cuda.mem_get_info(self._inputs.device)[0] < LEAST_FREE_BYTES:
            self._room = False
            said = "steps of new sizes are launched kernel by kernel, and slower; a smaller --memory leaves more"
            print(f"meltcore: too little GPU memory is left to record graphs: {said}", file=sys.stderr, flush=True)
        return self._room
