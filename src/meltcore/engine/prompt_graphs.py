"""Steps with prompts as CUDA graphs, where launching them would take longer than computing them.

Kernel by kernel, a step of 28 layers costs the host 10 to 16 ms whatever it holds, and everyone who decodes beside one
short prompt would wait for it. So a step is padded to the next of a few sizes, and replayed: 1 to 2 ms for a prompt of
a few hundred tokens. Where prompts are so long that the device is the slower one, nothing is gained and nothing padded.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from meltcore.engine.batch import Batch, NewPages
from meltcore.engine.graphs import PADDING_POSITION, PADDING_ROW, Captured, Recorder
from meltcore.engine.outbox import Outbox, aligned
from meltcore.kernels.attention import BLOCK_QUERIES
from meltcore.kernels.decode_tables import take_changes
from meltcore.models.loader import Progress

# In the place of a token that the host does not know yet: the newest of its row is meant.
ON_DEVICE = -1

# Tokens of prompts alone, and beside so many sequences that decode. Closer together where padding costs more; the host
# launches faster than an H200 computes more than the most of them.
ALONE = (
    *(64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, 3072),
    *(3584, 4096, 4608, 5120, 5632, 6144, 7168, 8192),
)
BESIDE = (128, 256, 512, 768, 1024, 2048, 4096)
DECODES = (16, 64, 128, 256, 512)


class Size(NamedTuple):
    """What a graph has places for: chunks of one token (`decodes`), and tokens of longer ones."""

    decodes: int
    tokens: int

    @property
    def prompts(self) -> int:
        """Chunks of more than one token: shorter ones than this leave places for tokens empty."""
        return max(4, self.tokens // 64)

    @property
    def sampled(self) -> int:
        return self.decodes + self.prompts

    @property
    def tiles(self) -> int:
        """Of queries: every prompt may end within one."""
        return self.tokens // BLOCK_QUERIES + self.prompts

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
    which row. Padding is the padding row's, which nobody reads.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    tiles: torch.Tensor
    last_tokens: torch.Tensor
    sample_rows: torch.Tensor

    @classmethod
    def within(cls, entries: torch.Tensor, size: Size) -> PaddedInputs:
        """Views of an array of at least `entries_of(size)`."""
        lengths = _lengths(size)
        starts = np.cumsum([0, *map(aligned, lengths)]).tolist()
        return cls(*(entries[start : start + length] for start, length in zip(starts, lengths, strict=False)))


def entries_of(size: Size) -> int:
    return sum(map(aligned, _lengths(size)))


def _lengths(size: Size) -> list[int]:
    tokens = size.decodes + size.tokens
    return [tokens, tokens, tokens, 2 * size.tiles, size.sampled, size.sampled]


def pad(batch: Batch, size: Size, inputs: PaddedInputs) -> None:
    """Write a batch that `size` holds into `inputs`, which lie in the host's memory."""
    gap = size.decodes - batch.decodes  # between the chunks of one token and the others

    def moved(tokens: Sequence[int]) -> np.ndarray:
        at = np.asarray(tokens, dtype=np.int64)
        return at + gap * (at >= batch.decodes)

    token_ids, positions, token_rows, tiles, last_tokens, sample_rows = (each.numpy() for each in inputs)
    token_ids[:] = 0
    positions[: size.decodes] = PADDING_POSITION
    positions[size.decodes :] = 0
    token_rows[:] = PADDING_ROW
    for target, given in zip(
        (token_ids, positions, token_rows), (batch.token_ids, batch.positions, batch.token_rows), strict=True
    ):
        target[: batch.decodes] = given[: batch.decodes]
        target[size.decodes : size.decodes + len(given) - batch.decodes] = given[batch.decodes :]
    token_ids[moved(batch.unread_tokens)] = ON_DEVICE
    tiles[:] = 0
    tiles.view(np.int32)[: batch.tiles.size] = batch.tiles.ravel()
    samples = len(batch.last_tokens)
    last_tokens[:samples], last_tokens[samples:] = moved(batch.last_tokens), 0
    sample_rows[:samples], sample_rows[samples:] = batch.sample_rows, PADDING_ROW


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

    @torch.inference_mode()
    def capture(self, progress: Progress) -> None:
        """Record sizes of prompts alone, the largest first, so that the smaller ones fit into the memory it took.

        The others, of which there are more, are recorded when they are first met: that costs the host as much as
        launching the step.
        """
        alone = [size for size in reversed(self._sizes) if not size.decodes]
        for number, size in enumerate(alone):
            inputs = PaddedInputs.within(self._inputs, size)
            for each in inputs:
                each.zero_()  # the padding row's first token, again and again
            self._step(inputs, size)
            torch.cuda.synchronize()
            self._captured[size] = self._recorder.record(partial(self._step, inputs, size))
            progress("capturing graphs of prompts", (number + 1) / len(alone))

    def size_for(self, batch: Batch) -> Size | None:
        """The smallest that holds a batch; None where it is left to be launched kernel by kernel."""
        first = bisect_left(self._totals, len(batch.token_ids))
        return next((size for size in self._sizes[first:] if size.holds(batch)), None)

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
            hidden, token_ids = captured.hidden, captured.token_ids
        count = len(batch.last_tokens)
        return hidden[:count], token_ids[:count]
