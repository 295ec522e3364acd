"""Replays steps with short prompts or drafts as CUDA graphs, since launching takes longer than computing them.

Launched kernel by kernel, a step of 28 layers costs the host 10 to 16 ms, however few tokens it has. Every sequence
that decodes beside a short prompt would wait for it. So a step is padded to the next of a few sizes (buckets) and
replayed: 1 to 2 ms for a prompt of a few hundred tokens. Longer prompts run without a graph, since the device takes
longer for them than the host.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from meltcore.engine.core.batch import Batch, MtpInputs, NewPages, RecurrentBatch
from meltcore.engine.memory.graph_sizes import (
    CAPTURED_DECODES,
    MAX_WINDOWS,
    bucket_shapes,
    decode_samples,
    max_prefills,
    window_shapes,
)
from meltcore.engine.worker.cuda_graphs import PADDING_POSITION, PADDING_ROW, CapturedGraph
from meltcore.engine.worker.transfer import StagingBuffer, align_entries, to_device
from meltcore.kernels.attention.metadata import BLOCK_QUERIES, longest_first, make_query_tiles
from meltcore.kernels.gated_delta.common import CHUNK
from meltcore.kernels.graph_capture import GraphCapturer
from meltcore.kernels.step_io import apply_updates
from meltcore.models.checkpoints.checkpoint import Progress

# Instead of a token id that the host does not know yet: the newest token of the row.
ON_DEVICE = -1

# A graph captured while serving takes some MiB out of the reserve, beside more logits than earlier graphs have. Steps
# need the rest of it.
MIN_FREE_BYTES = 2**27


class GraphBucket(NamedTuple):
    """The shape of a padded step: `num_decodes` chunks of one token, and `tokens` of longer chunks.

    The longer chunks are up to `windows` windows, each a token and its drafts, and prompts. Decodes and windows sample
    up to `decode_samples` tokens, or one each if this is 0. A bucket with windows and without decodes has no prompts,
    and there a chunk of one token is a window, too. A query tile has up to `max_tile_queries` tokens.
    """

    num_decodes: int
    tokens: int
    windows: int = 0
    decode_samples: int = 0
    max_tile_queries: int = BLOCK_QUERIES

    @property
    def prompts(self) -> int:
        """The maximum number of prompts. If prompts are shorter, tokens stay unused."""
        return 0 if self.windows and not self.num_decodes else max_prefills(self.tokens)

    @property
    def size(self) -> int:
        """The number of all tokens."""
        return self.num_decodes + self.tokens

    @property
    def other_chunks(self) -> int:
        """The maximum number of chunks beside `num_decodes`."""
        return self.windows + self.prompts

    @property
    def sequences(self) -> int:
        """The number of chunks, including one chunk of padding and one empty chunk for unused recurrent chunks."""
        return self.num_decodes + self.other_chunks + 2

    @property
    def samples(self) -> int:
        """The maximum number of sampled tokens: one of each decode and prompt, and every token of a window."""
        return max(self.num_decodes, self.decode_samples) + self.prompts

    @property
    def num_windows(self) -> int:
        """The number of chunks that recurrent layers compute as windows. Without prompts, padding is one of them."""
        return self.num_decodes + self.windows if self.prompts else self.sequences

    @property
    def draft_windows(self) -> int:
        """The number of windows after which a graph drafts by MTP. Beside prompts, drafting is launched by itself."""
        return 0 if self.prompts else self.windows

    @property
    def tiles(self) -> int:
        """The number of query tiles. Each prompt and the padding may end within a tile."""
        return self.tokens // self.max_tile_queries + self.other_chunks + 1

    @property
    def recurrent_chunks(self) -> int:
        """The number of chunks of recurrent layers. Each prompt and the padding may end within a chunk."""
        return self.tokens // CHUNK + self.prompts + 1

    def holds(self, batch: Batch) -> bool:
        """Return whether the batch fits into this shape."""
        if self.prompts and batch.is_following:
            return False
        if not self.prompts:  # a prompt samples one token at most
            has_prompts = len(batch.last_tokens) < len(batch.token_ids)
            return not has_prompts and len(batch.rows) <= self.windows and len(batch.token_ids) <= self.tokens
        tokens, num_prefills = len(batch.token_ids) - batch.num_decodes, len(batch.rows) - batch.num_decodes
        if batch.recurrent is not None:  # the layers tell windows from prompts
            num_windows = batch.recurrent.num_windows - batch.num_decodes
            if num_windows > self.windows or num_prefills - num_windows > self.prompts:
                return False
        holds_samples = len(batch.last_tokens) <= self.samples  # several of a chunk with drafts
        holds_chunks = batch.num_decodes <= self.num_decodes and num_prefills <= self.other_chunks
        return holds_samples and holds_chunks and tokens <= self.tokens


def graph_buckets(max_num_seqs: int, max_tokens: int, window: int = 1) -> list[GraphBucket]:
    """Return buckets of up to `max_tokens` prompt tokens and `max_num_seqs` decodes, ascending by all tokens.

    If `window` is more than one token, there are also buckets of windows of up to this many tokens. A bucket of decodes
    and prompts then has as many windows as decodes, if it has at most MAX_WINDOWS decodes.
    """
    shapes = window_shapes(max_num_seqs, max_tokens, window)
    buckets = [GraphBucket(0, tokens, windows, tokens, window) for windows, tokens in shapes]
    for num_decodes, tokens in bucket_shapes(max_num_seqs, max_tokens):
        windows = num_decodes if window > 1 and num_decodes <= MAX_WINDOWS else 0
        samples = decode_samples(num_decodes, max_num_seqs, window) if windows else 0
        buckets.append(GraphBucket(num_decodes, tokens, windows, samples))
    return sorted(buckets, key=lambda bucket: bucket.size)


class PaddedInputs(NamedTuple):
    """All inputs of a padded step, int64: `num_decodes` chunks of one token, then the tokens of the other chunks.

    Args:
        token_ids: [num_decodes + tokens]. ON_DEVICE stands for the row's newest token.
        positions: [num_decodes + tokens].
        token_rows: [num_decodes + tokens].
        tiles: [tiles * 2], query tiles, each of two int32 in one int64.
        last_tokens: [samples], the token whose logits are sampled.
        sample_rows: [samples], the row of that token.
        rows: [sequences].
        context_lens: [sequences].
        state_slots: [sequences].
        first_tokens: [sequences + 1].
        chunks: [recurrent_chunks], each of two int32 in one int64 (see the attention metadata).
        first_samples: [draft_windows + 1], the first sampled token of each window, then the number of sampled tokens.
        max_drafts: [draft_windows], the most drafts after each window, 0 for padding.
        num_pages: [draft_windows], the number of pages of each sequence, 0 for padding.
        is_following: [1], whether the device completes the inputs: see `follow_windows`.

    Padding has the padding row and the null slot. It is computed like other tokens: uninitialized memory may hold NaN.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    token_rows: torch.Tensor
    tiles: torch.Tensor
    last_tokens: torch.Tensor
    sample_rows: torch.Tensor
    rows: torch.Tensor
    context_lens: torch.Tensor
    state_slots: torch.Tensor
    first_tokens: torch.Tensor
    chunks: torch.Tensor
    first_samples: torch.Tensor
    max_drafts: torch.Tensor
    num_pages: torch.Tensor
    is_following: torch.Tensor

    @classmethod
    def views(cls, entries: Any, bucket: GraphBucket) -> PaddedInputs:
        """Return the inputs of a bucket as views of a tensor or numpy array of at least `input_entries(bucket)`."""
        return cls(*(entries[part] for part in _input_slices(bucket)))


def input_entries(bucket: GraphBucket) -> int:
    """Return the number of int64 in the inputs of a bucket."""
    last = _input_slices(bucket)[-1]
    return align_entries(last.stop)


@cache  # each step needs them, and an engine has a few dozen buckets
def _input_slices(bucket: GraphBucket) -> list[slice]:
    lengths = _input_lengths(bucket)
    starts = accumulate(map(align_entries, lengths), initial=0)
    return [slice(start, start + length) for start, length in zip(starts, lengths, strict=False)]


def _input_lengths(bucket: GraphBucket) -> list[int]:
    tokens, sequences = bucket.num_decodes + bucket.tokens, bucket.sequences
    per_token = [tokens, tokens, tokens, 2 * bucket.tiles, bucket.samples, bucket.samples]
    per_sequence, drafts = [sequences, sequences, sequences, sequences + 1], bucket.draft_windows
    return [*per_token, *per_sequence, bucket.recurrent_chunks, drafts + 1, drafts, drafts, 1]


_NO_TOKENS = np.zeros(0, np.int64)
EMPTY_BATCH = Batch(
    num_decodes=0,
    tiles=np.zeros((0, 4), np.int32),
    groups=[],
    token_ids=_NO_TOKENS,
    positions=_NO_TOKENS,
    token_rows=_NO_TOKENS,
    padded_positions=_NO_TOKENS,
    rows=[],
    context_lens=[],
    device_tokens=[],
    device_rows=[],
    last_tokens=[],
    sample_rows=[],
    recurrent=RecurrentBatch([], np.zeros(1, np.int64), np.zeros((0, 2), np.int32), [], []),
)
_NO_DRAFTS = MtpInputs(_NO_TOKENS, [], first_rows=[0], max_drafts=[], num_pages=[], started_rows=[], started_lengths=[])


def pad(batch: Batch, bucket: GraphBucket, inputs: PaddedInputs, mtp: MtpInputs | None = None) -> None:
    """Write a batch that `bucket` holds into `inputs`, views of a numpy array. `mtp` is None if no layer drafts.

    The device waits for this before each step with drafts, and tensors would take twice as long as arrays.
    """
    num_decodes = min(batch.num_decodes, bucket.num_decodes)  # in a bucket of windows, these are windows too

    def fill_split(target: Any, values: Sequence[int] | np.ndarray, decode_padding: int, prompt_padding: int) -> None:
        _fill(target[: bucket.num_decodes], values[:num_decodes], decode_padding)
        _fill(target[bucket.num_decodes :], values[num_decodes:], prompt_padding)

    fill_split(inputs.token_ids, batch.token_ids, 0, 0)
    inputs.token_ids[padded_indices(batch.device_tokens, batch, bucket)] = ON_DEVICE
    fill_split(inputs.positions, batch.positions, PADDING_POSITION, 0)
    fill_split(inputs.token_rows, batch.token_rows, PADDING_ROW, PADDING_ROW)
    padding_sizes = _chunk_sizes(bucket.tokens - (len(batch.token_ids) - num_decodes), bucket.max_tile_queries)
    ends = len(batch.token_ids) - num_decodes + np.cumsum(padding_sizes, dtype=np.int32)
    padding = np.stack(
        [np.full_like(padding_sizes, PADDING_ROW), ends - padding_sizes, padding_sizes, np.zeros_like(padding_sizes)], 1
    )
    _fill(inputs.tiles, np.concatenate([_tiles_from(batch, num_decodes), padding]).reshape(-1).view(np.int64), 0)
    _fill(inputs.last_tokens, padded_indices(batch.last_tokens, batch, bucket), 0)
    _fill(inputs.sample_rows, batch.sample_rows, PADDING_ROW)
    drafting = mtp if mtp is not None and mtp.rows and bucket.draft_windows else _NO_DRAFTS
    _fill(inputs.first_samples, drafting.first_rows, drafting.first_rows[-1])
    _fill(inputs.max_drafts, drafting.max_drafts, 0)
    _fill(inputs.num_pages, drafting.num_pages, 0)
    inputs.is_following[:] = batch.is_following
    if batch.recurrent is None:
        fill_split(inputs.rows, batch.rows, PADDING_ROW, PADDING_ROW)
        fill_split(inputs.context_lens, batch.context_lens, PADDING_POSITION, 0)
    else:
        _pad_recurrent(batch, batch.recurrent, num_decodes, bucket, inputs)


def padded_indices(tokens: Sequence[int], batch: Batch, bucket: GraphBucket) -> np.ndarray:
    """Return the indices of a batch's tokens in the padded step, whose first entries are for chunks of one token."""
    indices, num_decodes = np.asarray(tokens, dtype=np.int64), min(batch.num_decodes, bucket.num_decodes)
    return indices + (bucket.num_decodes - num_decodes) * (indices >= num_decodes)


def _tiles_from(batch: Batch, num_decodes: int) -> np.ndarray:
    """Return the query tiles of all chunks but the first `num_decodes`, which have one token each: [tiles, 4] int32."""
    singles = range(num_decodes, batch.num_decodes)
    tiles = make_query_tiles((batch.rows[i], i - num_decodes, 1, batch.context_lens[i]) for i in singles)
    return longest_first(np.concatenate([tiles, batch.tiles + np.array([0, len(tiles), 0, 0], np.int32)]))


def _pad_recurrent(
    batch: Batch, recurrent: RecurrentBatch, num_decodes: int, bucket: GraphBucket, inputs: PaddedInputs
) -> None:
    """Write what recurrent layers read of the sequences: decodes, windows and prompts, padded each."""
    # The first prompt, among the sequences of the batch and of the padded step.
    first_prompt, padded_first_prompt = max(num_decodes, recurrent.num_windows), bucket.num_windows

    def fill_sequences(target: Any, values: Sequence[int], window_padding: int, prompt_padding: int) -> None:
        _fill(target[: bucket.num_decodes], values[:num_decodes], window_padding)
        _fill(target[bucket.num_decodes : padded_first_prompt], values[num_decodes:first_prompt], window_padding)
        _fill(target[padded_first_prompt:], values[first_prompt:], prompt_padding)

    fill_sequences(inputs.rows, batch.rows, PADDING_ROW, PADDING_ROW)
    fill_sequences(inputs.context_lens, batch.context_lens, PADDING_POSITION, 0)
    fill_sequences(inputs.state_slots, recurrent.slots, 0, 0)

    first_tokens: Any = inputs.first_tokens
    starts = recurrent.first_tokens + (bucket.num_decodes - num_decodes)  # of windows and prompts, then the end
    first_tokens[: bucket.num_decodes] = np.arange(bucket.num_decodes)
    windows = first_tokens[bucket.num_decodes : padded_first_prompt]
    _fill(windows, starts[num_decodes:first_prompt], starts[first_prompt])  # windows of padding are empty
    _fill(first_tokens[padded_first_prompt:], starts[first_prompt:], starts[-1])
    first_tokens[-2:] = bucket.size
    num_padding_chunks = len(_chunk_sizes(int(first_tokens[-1] - starts[-1]), CHUNK))
    padded_chunks = np.zeros((bucket.recurrent_chunks, 2), np.int32)
    padded_chunks[:, 0] = bucket.sequences - 1
    padded_chunks[: len(recurrent.chunks)] = recurrent.chunks + np.array(
        [padded_first_prompt - first_prompt, 0], np.int32
    )
    padding_chunks = padded_chunks[len(recurrent.chunks) : len(recurrent.chunks) + num_padding_chunks]
    padding_chunks[:, 0], padding_chunks[:, 1] = bucket.sequences - 2, np.arange(num_padding_chunks)
    _fill(inputs.chunks, padded_chunks.reshape(-1).view(np.int64), 0)


def _fill(target: Any, values: Sequence[int] | np.ndarray, padding: int) -> None:
    """Write `values`, then `padding` up to the end of the target, a numpy array."""
    target[: len(values)], target[len(values) :] = values, padding


def _chunk_sizes(tokens: int, max_size: int) -> np.ndarray:
    """Return the sizes of the chunks of at most `max_size` that `tokens` are cut into: [chunks] int32."""
    return np.minimum(max_size, tokens - np.arange(0, tokens, max_size)).astype(np.int32)


# From the inputs of a bucket on the device to the hidden states that are sampled, [samples, hidden_size], and the
# greedy tokens [samples] int64.
PaddedStep = Callable[[PaddedInputs, GraphBucket], tuple[torch.Tensor, torch.Tensor]]
# From the inputs of a bucket and the sampled tokens [samples] to the outcomes of its windows: see `MtpDrafter`.
PaddedDrafts = Callable[[PaddedInputs, GraphBucket, torch.Tensor], torch.Tensor]


class PrefillGraphs:
    """The graphs of steps with prompts or drafts."""

    def __init__(
        self,
        step: PaddedStep,
        buckets: list[GraphBucket],
        page_table: torch.Tensor,
        logit_bytes: int,
        draft: PaddedDrafts | None = None,
    ) -> None:
        """Allocate the inputs of all buckets.

        Args:
            step: computes eagerly what a replay will compute.
            buckets: the shapes of graphs, in ascending order of their tokens.
            page_table: [rows, pages of a sequence] int64.
            logit_bytes: the bytes of a row of logits, which `step` computes for each sampled token.
            draft: drafts after windows, in graphs of their own: the sampler may run before. None captures no such
                graphs.
        """
        self._step, self._draft = step, draft
        self._logit_bytes = logit_bytes
        # Returns whether its argument is true on all ranks, which must run the same graphs. Here there is one rank.
        self.on_all_ranks: Callable[[bool], bool] = bool
        self._buckets = buckets
        self._bucket_sizes = [bucket.size for bucket in buckets]
        self._page_table = page_table
        num_entries = max(map(input_entries, buckets))
        self._inputs = torch.zeros(num_entries, dtype=torch.int64, device=page_table.device)
        self._staging = StagingBuffer(2 * num_entries)
        self._capturer = GraphCapturer()
        self._captured: dict[GraphBucket, CapturedGraph] = {}
        self._drafting: dict[GraphBucket, tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}  # and the outcomes
        self._memory_left = True
        self._following = EMPTY_BATCH, np.zeros(0, np.int64)  # the newest such batch, and its padded inputs

    @torch.inference_mode()
    def capture(self, progress: Progress, *, capture_all: bool = False) -> None:
        """Capture buckets of few decodes or windows, the largest first, so that smaller graphs fit into its memory.

        Other buckets are captured at their first use, or immediately with `capture_all`.
        """
        self._memory_left = not capture_all
        first_buckets = [
            bucket
            for bucket in reversed(self._buckets)
            if capture_all or max(bucket.num_decodes, bucket.windows) <= CAPTURED_DECODES
        ]
        for index, bucket in enumerate(first_buckets):
            self._launch_padding(bucket)
            torch.cuda.synchronize()
            self._capture(bucket)
            progress("capturing prefill graphs", (index + 1) / len(first_buckets))

    def bucket_for(self, batch: Batch) -> GraphBucket | None:
        """Return the smallest bucket that holds a batch. Returns None if kernels should be launched one by one."""
        first_index = bisect_left(self._bucket_sizes, len(batch.token_ids))
        bucket = next((bucket for bucket in self._buckets[first_index:] if bucket.holds(batch)), None)
        if bucket is None or bucket in self._captured or self._has_memory(bucket):
            return bucket
        return None

    def holds_windows(self, num_windows: int, num_tokens: int) -> bool:
        """Return whether a graph of windows alone holds this many of them, with this many tokens."""
        buckets = (each for each in self._buckets if each.draft_windows >= num_windows and each.tokens >= num_tokens)
        bucket = next(buckets, None)
        return bucket is not None and (bucket in self._captured or self._has_memory(bucket))

    def replay(
        self, batch: Batch, bucket: GraphBucket, new_pages: NewPages, mtp: MtpInputs | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a step after writing `new_pages` to the page table. `mtp` is what `replay_drafting` needs.

        Returns the hidden states that are sampled and their greedy tokens. The next replay of the bucket overwrites
        both.
        """
        if bucket not in self._captured:
            self._launch_padding(bucket)
            self._capture(bucket)
        num_entries, num_new_pages = input_entries(bucket), len(new_pages.rows)
        staging_buffer, read_event = self._staging.take(num_entries + 3 * num_new_pages)
        staged = staging_buffer.numpy()
        if batch.is_following and batch is self._following[0]:
            staged[:num_entries] = self._following[1]
            if mtp is not None:
                _fill(staged[_input_slices(bucket)[PaddedInputs._fields.index("num_pages")]], mtp.num_pages, 0)
        else:
            pad(batch, bucket, PaddedInputs.views(staged, bucket), mtp)
            if batch.is_following:
                self._following = batch, staged[:num_entries].copy()
        staged[num_entries:] = [*new_pages.rows, *new_pages.columns, *new_pages.pages]
        apply_updates(staging_buffer, self._inputs[:num_entries], self._page_table, num_new_pages)
        read_event.record()
        captured = self._captured[bucket]
        captured.graph.replay()
        num_samples = len(batch.last_tokens)
        return captured.values[:num_samples], captured.token_ids[:num_samples]

    def replay_drafting(self, bucket: GraphBucket, num_windows: int, token_ids: torch.Tensor) -> torch.Tensor:
        """Draft after the windows of the newest replay, whose `token_ids` hold what was sampled instead of them.

        Returns the outcomes [num_windows, 2 + drafts] int64, which the next replay overwrites.
        """
        assert token_ids.data_ptr() == self._captured[bucket].token_ids.data_ptr(), "the graph reads these"
        graph, outcomes = self._drafting[bucket]
        graph.replay()
        return outcomes[:num_windows]

    def inputs(self, bucket: GraphBucket) -> PaddedInputs:
        """Return the inputs of the newest replay of a bucket, on the device."""
        return PaddedInputs.views(self._inputs, bucket)

    def _launch_padding(self, bucket: GraphBucket) -> None:
        """Run a step of padding alone, so that no kernel is loaded during a capture."""
        padding = np.zeros(input_entries(bucket), dtype=np.int64)
        pad(EMPTY_BATCH, bucket, PaddedInputs.views(padding, bucket))
        self._inputs[: len(padding)] = to_device(padding, torch.int64, self._inputs.device)
        inputs = self.inputs(bucket)
        _, token_ids = self._step(inputs, bucket)
        if self._draft is not None and bucket.draft_windows:
            self._draft(inputs, bucket, token_ids)

    def _capture(self, bucket: GraphBucket) -> None:
        inputs = self.inputs(bucket)
        graph, (hidden, token_ids) = self._capturer.capture(partial(self._step, inputs, bucket))
        if self._draft is not None and bucket.draft_windows:
            self._drafting[bucket] = self._capturer.capture(partial(self._draft, inputs, bucket, token_ids))
        self._captured[bucket] = CapturedGraph(graph, hidden, token_ids)

    def _has_memory(self, bucket: GraphBucket) -> bool:
        """Return whether memory is left for the graph of a bucket. After the first False, no more are captured."""
        if not self._memory_left:
            return False
        most_samples = max((captured.samples for captured in self._captured), default=0)
        needed_bytes = MIN_FREE_BYTES + self._logit_bytes * max(0, bucket.samples - most_samples)
        self._memory_left = self.on_all_ranks(torch.cuda.mem_get_info(self._inputs.device)[0] >= needed_bytes)
        if not self._memory_left:
            advice = "steps of new sizes run slower, kernel by kernel; a smaller --memory leaves more"
            print(f"meltcore: too little GPU memory is left for CUDA graphs: {advice}", file=sys.stderr, flush=True)
        return self._memory_left
