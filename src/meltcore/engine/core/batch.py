"""Converts the chunks of a step to the flat arrays that the device reads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.kv_cache import PAGE_SIZE, pages_for
from meltcore.engine.core.request import Request
from meltcore.kernels.attention.metadata import BLOCK_QUERIES, PaddedGroup, make_query_tiles
from meltcore.kernels.gated_delta.common import make_chunk_indices

# A padded group's mask has sequences * queries * keys entries; a larger group is split (16 MiB of bool).
_MASK_LIMIT = 2**24


class RecurrentBatch(NamedTuple):
    """The inputs of a step for recurrent layers.

    Args:
        slots: slot of each chunk.
        first_tokens: index of each chunk's first token, then the number of tokens.
        chunks: how sequences of several tokens are cut for the kernels (`delta_chunks`).
        restores: pairs (from, to) of slots to copy, in this order, before the step.
        snapshots: pairs (from, to) of slots to copy, in this order, after the step.
        num_windows: number of chunks without `chunks`, which come first: chunks of one token, and windows with drafts.
    """

    slots: list[int]
    first_tokens: np.ndarray
    chunks: np.ndarray
    restores: list[tuple[int, int]]
    snapshots: list[tuple[int, int]]
    num_windows: int = 0


class PromptTargets(NamedTuple):
    """The prompt tokens of a step whose log-probabilities are requested.

    Args:
        tokens: for each of these prompt tokens, the index in the batch of the token before it.
        token_ids: the ids of these prompt tokens.
        num_logprobs: the maximum number of alternatives that any request asks for.
    """

    tokens: list[int]
    token_ids: list[int]
    num_logprobs: int


class Batch(NamedTuple):
    """The chunks of a step as flat arrays. Chunks are ordered so that neighbors need little padding.

    Args:
        num_decodes: number of chunks of one token, which come first.
        tiles: query tiles of the other chunks (`query_tiles`), counted from the first of these chunks.
        groups: padding for the reference attention (`PaddedGroup`).
        padded_positions: number of positions in all groups.
        token_ids: known ids and drafts, or 0 for a token whose id only the device knows.
        device_tokens: indices of the tokens whose ids only the device knows.
        device_rows: the row of each of these tokens. The device has their ids as the rows' last tokens.
        last_tokens: index of the last token of each chunk that samples, and before it of the token that comes before
            each of its drafts.
        sample_rows: row of each of these tokens.
        recurrent: None for a model without recurrent layers.
        prompt_targets: None unless a request asks for prompt log-probabilities.
        is_following: whether the chunks are windows that follow a step in flight, so that only the device knows their
            token ids and how far `positions`, `tiles` and `context_lens` are from those given here (`follow_windows`).
    """

    num_decodes: int
    tiles: np.ndarray
    groups: list[PaddedGroup]
    token_ids: np.ndarray
    positions: np.ndarray
    token_rows: np.ndarray
    padded_positions: np.ndarray
    rows: list[int]
    context_lens: list[int]
    device_tokens: list[int]
    device_rows: list[int]
    last_tokens: list[int]
    sample_rows: list[int]
    recurrent: RecurrentBatch | None
    prompt_targets: PromptTargets | None = None
    is_following: bool = False

    def max_tile_queries(self, window: int) -> int:
        """Return the upper bound of a query tile's tokens: `window` if all tiles fit into it, else BLOCK_QUERIES.

        So only two variants of the kernel are compiled.
        """
        return window if int(self.tiles[:, 2].max(initial=0)) <= window else BLOCK_QUERIES


class Windows(NamedTuple):
    """The logits from which a step with drafts samples: of each chunk that samples one row more than it has drafts.

    Args:
        requests: the request of each row.
        drafts: the drafts before the sampled token of each row, none in the first row of a chunk.
        first_rows: the first row of each chunk that samples, then the number of rows.
    """

    requests: list[Request]
    drafts: list[tuple[int, ...]]
    first_rows: list[int]

    @classmethod
    def of(cls, chunks: Iterable[Chunk]) -> Windows:
        """Return the rows of the chunks that sample."""
        windows = cls([], [], [0])
        for chunk in chunks:
            if chunk.samples:
                size = 1 + len(chunk.drafts)
                windows.requests.extend([chunk.request] * size)
                windows.drafts.extend(chunk.drafts[:count] for count in range(size))
                windows.first_rows.append(len(windows.drafts))
        return windows


class MtpInputs(NamedTuple):
    """What drafts by multi-token prediction need of a step, beside its batch. All ranks draft from the same inputs.

    Args:
        next_ids: the id of the token that follows each token of the batch, or 0 for a token that the step samples.
        rows: row of each sequence that samples, or no rows if the step proposes no drafts.
        first_rows: the first sampled row of each of these sequences, then the number of sampled rows.
        max_drafts: the most drafts that each of these sequences may get.
        num_pages: the number of pages of each of these sequences.
        started_rows: row of each of these sequences that has started, or that had a step without a drafter.
        started_lengths: the number of known tokens of each sequence in `started_rows`.
    """

    next_ids: np.ndarray
    rows: list[int]
    first_rows: list[int]
    max_drafts: list[int]
    num_pages: list[int]
    started_rows: list[int]
    started_lengths: list[int]

    @classmethod
    def of(cls, chunks: list[Chunk], windows: Windows | None, max_drafts: int) -> MtpInputs:
        """Return the inputs of a step with these chunks, in the order of its batch.

        `windows` are the rows after which the step proposes up to `max_drafts` drafts, and None if it proposes none.
        """
        next_ids, end = np.zeros(sum(chunk.size for chunk in chunks), dtype=np.int64), 0
        samples_all = windows is not None and len(windows.requests) == len(next_ids)
        for chunk in () if samples_all else chunks:
            known_ids = chunk.request.token_ids[chunk.start + 1 : chunk.end + 1]
            next_ids[end : end + len(known_ids)] = known_ids
            end += chunk.size
        requests = [] if windows is None else [windows.requests[row] for row in windows.first_rows[:-1]]
        started = [request for request in requests if request.num_in_history != len(request.token_ids)]
        return cls(
            next_ids=next_ids,
            rows=[request.row for request in requests],
            first_rows=[] if windows is None else windows.first_rows,
            max_drafts=[max_drafts * request.sampling.speculative_decoding for request in requests],
            num_pages=[len(request.pages) for request in requests],
            started_rows=[request.row for request in started],
            started_lengths=[len(request.token_ids) for request in started],
        )


class NewPages(NamedTuple):
    """Changed entries of the device's page table. Row rows[i] gets the page pages[i] in column columns[i]."""

    rows: list[int]
    columns: list[int]
    pages: list[int]


class Step(NamedTuple):
    """All inputs of a step for the device, as numbers, so that they can be sent to other ranks.

    If every sequence decodes a token that is on the device already, `rows` and `positions` describe the step and
    `batch` is None. Otherwise they are empty. `mtp` is None if no layer for multi-token prediction runs in the step.
    """

    new_pages: NewPages
    rows: list[int]
    positions: list[int]
    batch: Batch | None
    mtp: MtpInputs | None = None


def take_new_pages(chunks: list[Chunk], sub_groups: int = 1, table_rows: int = 0) -> NewPages:
    """Return the pages that were allocated to the sequences since their last step, and mark them as sent.

    The page table has `table_rows` rows per sub-group, one sub-group after another.
    """
    rows: list[int] = []
    columns: list[int] = []
    pages: list[int] = []
    for chunk in chunks:
        request = chunk.request
        num_sent, num_pages = request.sent_pages, len(request.pages)
        if num_sent < num_pages:
            first_column, end_column = num_sent // sub_groups, num_pages // sub_groups
            for sub_group in range(sub_groups):
                rows += [request.row + sub_group * table_rows] * (end_column - first_column)
                columns += range(first_column, end_column)
                pages += request.pages[num_sent + sub_group :: sub_groups]
            request.sent_pages = num_pages
    return NewPages(rows, columns, pages)


def sort_longest_first(chunks: list[Chunk]) -> list[Chunk]:
    """Sort decoding sequences by descending length, the best order in which to start their attention.

    The last sequence to start is computed alone at the end, so it should be short (longest processing time first:
    Graham 1969, "Bounds on Multiprocessing Timing Anomalies").
    """
    return sorted(chunks, key=lambda chunk: chunk.start, reverse=True)


def build_batch(scheduled: list[Chunk], *, has_recurrent: bool) -> tuple[list[Chunk], Batch]:
    """Sort, group and flatten the chunks of a step. Return the chunks in the order of the batch, and the batch.

    There must be at least one chunk.
    """
    longest_first = [(chunk, _padding_class(chunk)) for chunk in sort_longest_first(scheduled)]
    # Decodes of one token, then decodes with drafts, then prompts; of each, similar sizes, and the longest first.
    longest_first.sort(key=lambda each: (each[0].prompt_tokens > 0, each[1][0], -each[1][1]))
    chunks = [chunk for chunk, _ in longest_first]
    sizes = np.array([chunk.size for chunk in chunks])
    ends = np.cumsum(sizes)
    context_lens = np.array([chunk.start for chunk in chunks])
    rows = np.array([chunk.request.row for chunk in chunks])
    offsets = np.arange(ends[-1]) - np.repeat(ends - sizes, sizes)  # of each token in its chunk
    groups = _group_by_padding(longest_first, ends.tolist())
    num_decodes = int((sizes == 1).sum())

    token_ids = np.zeros(ends[-1], dtype=np.int64)
    device_tokens, device_rows = [], []
    for chunk, end in zip(chunks, ends.tolist(), strict=True):
        known_ids = chunk.request.token_ids
        if chunk.drafts:
            token_ids[end - chunk.size : end] = known_ids[chunk.start], *chunk.drafts
        elif chunk.start < len(known_ids):
            token_ids[end - chunk.size : end] = known_ids[chunk.start : chunk.start + chunk.size]
        else:
            device_tokens.append(end - 1)
            device_rows.append(chunk.request.row)

    padded_positions = offsets.copy()
    for group in groups:
        sequences = np.arange(group.last - group.first).repeat(sizes[group.first : group.last])
        padded_positions[group.first_token : group.last_token] += sequences * group.max_queries
    sampled_rows = [
        (token, chunk.request.row)
        for chunk, end in zip(chunks, ends.tolist(), strict=True)
        if chunk.samples
        for token in range(end - 1 - len(chunk.drafts), end)
    ]
    batch = Batch(
        num_decodes=num_decodes,
        tiles=make_query_tiles(
            [
                (chunk.request.row, end - chunk.size - num_decodes, chunk.size, chunk.start)
                for chunk, end in zip(chunks[num_decodes:], ends.tolist()[num_decodes:], strict=True)
            ]
        ),
        groups=groups,
        token_ids=token_ids,
        positions=offsets + np.repeat(context_lens, sizes),
        token_rows=np.repeat(rows, sizes),
        padded_positions=padded_positions,
        rows=rows.tolist(),
        context_lens=context_lens.tolist(),
        device_tokens=device_tokens,
        device_rows=device_rows,
        last_tokens=[token for token, _ in sampled_rows],
        sample_rows=[row for _, row in sampled_rows],
        recurrent=_recurrent_batch(scheduled, chunks, sizes) if has_recurrent else None,
        prompt_targets=_prompt_targets(chunks, ends.tolist()),
        is_following=any(chunk.is_following for chunk in chunks),
    )
    return chunks, batch


class BatchBuilder:
    """Builds batches and windows. Those of a step that follows windows are kept, since the next step often has them."""

    def __init__(self, *, has_recurrent: bool) -> None:
        """Build batches for a model that may have recurrent layers."""
        self._has_recurrent = has_recurrent
        self._key: tuple[object, ...] = ()
        self._kept: tuple[list[Chunk], Batch, Windows] | None = None

    def build(self, scheduled: list[Chunk]) -> tuple[list[Chunk], Batch]:
        """Return the chunks in the order of the batch, and the batch (`build_batch`)."""
        if not any(chunk.is_following for chunk in scheduled):
            self._kept = None
            return build_batch(scheduled, has_recurrent=self._has_recurrent)
        key = *scheduled, *((chunk.request.row, chunk.request.recurrent_slot) for chunk in scheduled)
        if self._kept is None or key != self._key:
            chunks, batch = build_batch(scheduled, has_recurrent=self._has_recurrent)
            self._key, self._kept = key, (chunks, batch, Windows.of(chunks))
        return self._kept[:2]

    def windows(self, chunks: list[Chunk]) -> Windows:
        """Return the windows of these chunks, the newest that were built (`Windows.of`)."""
        return Windows.of(chunks) if self._kept is None or chunks is not self._kept[0] else self._kept[2]


def scored_positions(chunk: Chunk) -> range:
    """Return the positions of a chunk whose logits score the next prompt token.

    The range is empty unless the request asks for prompt log-probabilities.
    """
    if chunk.request.sampling.prompt_logprobs is None:
        return range(0)
    return range(chunk.start, max(chunk.start, min(chunk.end, chunk.request.prompt_length - 1)))


def _prompt_targets(chunks: list[Chunk], ends: list[int]) -> PromptTargets | None:
    tokens: list[int] = []
    token_ids: list[int] = []
    num_logprobs = 0
    for chunk, end in zip(chunks, ends, strict=True):
        if positions := scored_positions(chunk):
            first_token = end - chunk.size
            tokens += range(first_token, first_token + len(positions))
            token_ids += chunk.request.token_ids[positions.start + 1 : positions.stop + 1]
            num_logprobs = max(num_logprobs, chunk.request.sampling.prompt_logprobs or 0)
    return PromptTargets(tokens, token_ids, num_logprobs) if tokens else None


def _recurrent_batch(scheduled: list[Chunk], chunks: list[Chunk], sizes: np.ndarray) -> RecurrentBatch:
    """Return the slots, chunks and state copies of a step for recurrent layers.

    Copies keep the order of `scheduled`: a snapshot may be evicted and its slot allocated once its copy is scheduled.
    """
    num_windows = sum(not chunk.prompt_tokens for chunk in chunks)
    return RecurrentBatch(
        slots=[chunk.request.recurrent_slot for chunk in chunks],
        first_tokens=np.concatenate([[0], np.cumsum(sizes)]),
        chunks=make_chunk_indices(sizes.tolist(), num_windows),
        restores=[(chunk.restore, chunk.request.recurrent_slot) for chunk in scheduled if chunk.restore],
        snapshots=[(chunk.request.recurrent_slot, chunk.snapshot) for chunk in scheduled if chunk.snapshot],
        num_windows=num_windows,
    )


def _padding_class(chunk: Chunk) -> tuple[int, int]:
    """Return the query length and page count of a chunk, each rounded up to a power of two.

    Chunks of one class waste less than half of their computation by padding.
    """
    return (chunk.size - 1).bit_length(), (pages_for(chunk.start + chunk.size) - 1).bit_length()


def _group_by_padding(classified: list[tuple[Chunk, tuple[int, int]]], ends: list[int]) -> list[PaddedGroup]:
    """Return the groups of chunks that are padded together. A chunk comes with its padding class."""
    groups, chunks, classes = [], [each[0] for each in classified], [each[1] for each in classified]
    first = 0
    while first < len(chunks):
        last = first + 1
        queries, pages = chunks[first].size, pages_for(chunks[first].start + chunks[first].size)
        while last < len(chunks) and classes[last] == classes[first]:
            max_queries = max(queries, chunks[last].size)
            max_pages = max(pages, pages_for(chunks[last].start + chunks[last].size))
            if (last + 1 - first) * max_queries * max_pages * PAGE_SIZE > _MASK_LIMIT:
                break
            queries, pages, last = max_queries, max_pages, last + 1
        first_token = ends[first - 1] if first else 0
        groups.append(PaddedGroup(first, last, first_token, ends[last - 1], queries, pages))
        first = last
    return groups
