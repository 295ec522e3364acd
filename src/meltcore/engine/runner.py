"""Runs a step of the model on the device: tables, forward, sampling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, Protocol

import torch

from meltcore.engine.batch import Batch, NewPages, Step, build_batch, longest_first, take_new_pages
from meltcore.engine.graphs import Decoded, GraphPool, padded_sizes
from meltcore.engine.page_pool import PAGE_SIZE
from meltcore.engine.prompt_graphs import PaddedInputs, PromptGraphs, Size, prompt_sizes
from meltcore.engine.request import Request, Sampled
from meltcore.engine.sampler import Sampler, SampleResult
from meltcore.engine.scheduler import Chunk, pages_for
from meltcore.engine.state_cache import StateCache
from meltcore.engine.transfer import to_device, to_device_together
from meltcore.kernels.paged_attention import Segments
from meltcore.kernels.sampling import greedy
from meltcore.models.cache import split_groups
from meltcore.models.decoder import Decoder
from meltcore.models.loader import Progress

# On GPUs of less memory the largest graph of prompts has an eighth: they cannot spare what it takes.
_LARGE_BYTES = 32 * 2**30

# The logits [rows, vocab], in the type of the model, of the rows asked for ([rows] int64 on the device).
LogitsAt = Callable[[torch.Tensor], torch.Tensor]


class Event(Protocol):
    """A point in what the device was told to do."""

    def synchronize(self) -> None: ...


class LaunchedStep(NamedTuple):
    """A step under way on the device. `read` waits for it."""

    chunks: list[Chunk]
    result: SampleResult
    done: Event | None

    def read(self) -> list[Sampled]:
        """What each sampling chunk chose, in the order of `chunks`."""
        if self.done is not None:
            self.done.synchronize()
        requests = [chunk.request for chunk in self.chunks if chunk.samples]
        return [Sampled(token_id, logprobs) for token_id, logprobs in self.result.read(requests)]


class Layout(NamedTuple):
    """How much a runner has places for: pages and state slots, beside one of each for padding; sequences at once, the
    tokens of one, and those of a step; sequences that choose from their logits at once, without ranks."""

    pages: int
    state_slots: int
    max_num_seqs: int
    max_model_len: int
    max_num_batched_tokens: int
    logit_rows: int


class ModelRunner:
    """Holds the caches and a table row for each running sequence: its pages, its state slot and its newest token."""

    most_graph_tokens = 8192  # of prompts: longer steps take the device longer than launching them takes the host

    def __init__(self, model: Decoder, sampler: Sampler, layout: Layout, cache_dtype: torch.dtype) -> None:
        self.model = model
        self.sampler = sampler
        self.device = model.embedding.device
        rows = layout.max_num_seqs + 1  # row 0 is for padding
        group, state_group = split_groups(model.cache_groups())
        shape = (layout.pages + 1, PAGE_SIZE, group.kv_heads, group.head_dim)  # page 0 is for padding
        self._states: StateCache | None = None
        if state_group is not None:
            dtype = model.embedding.dtype
            self._states = StateCache(state_group, slots=layout.state_slots, rows=rows, dtype=dtype, device=self.device)
        self.caches = _caches(model, shape, cache_dtype, self._states)
        self._layout = layout
        self._page_table = torch.zeros(rows, pages_for(layout.max_model_len), dtype=torch.int64, device=self.device)
        self._last_token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._graphs: GraphPool | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._decoded: Decoded | None = None  # by the newest step, where it was a graph's
        self._logits: torch.Tensor | None = None  # [sequences, tokens], where graphs of decode steps put them

    def capture_graphs(self, progress: Progress, *, prompts: bool) -> None:
        """Make pure decode steps replay CUDA graphs from now on, and those with `prompts` where they are short."""
        head = self.model.head
        self._logits = torch.empty(self._layout.max_num_seqs, len(head), dtype=head.dtype, device=self.device)
        graphs = self._decode_graphs()
        graphs.capture(progress)
        self._graphs = graphs
        if prompts:
            self._capture_prompt_graphs(progress)

    def _decode_graphs(self) -> GraphPool:
        sizes = padded_sizes(self._layout.max_num_seqs)
        return GraphPool(self._decode_step, sizes, self._last_token, self._page_table)

    def _capture_prompt_graphs(self, progress: Progress) -> None:
        most = self.most_graph_tokens if _memory_bytes(self.device) >= _LARGE_BYTES else self.most_graph_tokens // 8
        sizes = prompt_sizes(self._layout.max_num_seqs, min(most, self._layout.max_num_batched_tokens))
        if sizes:
            graphs = PromptGraphs(self._padded_step, sizes, self._page_table)
            graphs.capture(progress)
            self._prompt_graphs = graphs

    def alone(self) -> AbstractContextManager[None]:
        """In which nothing that is launched needs anybody else."""
        return nullcontext()

    @torch.inference_mode()
    def rehearse_decodes(self, counts: list[int]) -> None:
        """Go through decode steps of so much padding, for `compile_ahead`."""
        if counts:
            self._decode_graphs().rehearse(counts)

    def forget_tokens(self) -> None:
        """Make each row's newest token 0 again: a rehearsal leaves there what is no token at all."""
        self._last_token.zero_()

    @torch.inference_mode()
    def launch(self, plan: list[Chunk]) -> LaunchedStep:
        """Start a step and return without waiting for the device."""
        chunks, step = self._describe(plan)
        requests = [chunk.request for chunk in chunks if chunk.samples]
        result = self._run(step, requests)
        if self._decoded is not None and all(request.plain_greedy for request in requests):
            on_host = SampleResult(self._decoded.on_host, [], None)  # written by the graph
        else:
            on_host = result.copy_to_host()
        return LaunchedStep(chunks, on_host, self._done())

    def choose(self, logits_at: LogitsAt, token_ids: torch.Tensor, requests: list[Request]) -> SampleResult:
        """Replace the greedy choice `token_ids` [rows] where a request wants another; in place.

        `logits_at` gives the logits of some rows: most steps need none.
        """
        rows = [row for row, request in enumerate(requests) if not request.plain_greedy]
        if not rows:
            return SampleResult(token_ids, [], None)
        at, most = self._tensor(rows), self._layout.logit_rows
        asking = [requests[row] for row in rows]
        chosen = SampleResult.of_blocks(
            [
                self.sampler.sample(logits_at(at[first : first + most]), asking[first : first + most])
                for first in range(0, len(rows), most)
            ]
        )
        token_ids[at] = chosen.token_ids
        self._last_token[self._tensor([request.row for request in asking])] = chosen.token_ids
        return SampleResult(token_ids, [rows[row] for row in chosen.logprob_rows], chosen.logprobs)

    def likeliest(self, logits: torch.Tensor) -> torch.Tensor:
        """[rows] int64, from the logits that the model gives."""
        return greedy(logits)

    def _run(self, step: Step, requests: list[Request]) -> SampleResult:
        """Compute a step and choose; `requests` are those that sample, in the order of the step."""
        token_ids, logits_at = self._compute(step)
        return self.choose(logits_at, token_ids, requests)

    def _done(self) -> Event | None:
        """What marks that the device is past all that was launched; nothing on a CPU, where it is done at once."""
        if self.device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def _describe(self, plan: list[Chunk]) -> tuple[list[Chunk], Step]:
        """A plan in numbers, and its chunks in the order of their results."""
        new_pages = take_new_pages(plan)
        if self._graphs is not None and all(chunk.request.on_device for chunk in plan):
            chunks = longest_first(plan)
            rows, positions = [chunk.request.row for chunk in chunks], [chunk.start for chunk in chunks]
            return chunks, Step(new_pages, rows, positions, None)
        chunks, batch = build_batch(plan, recurrent=self._states is not None)
        for chunk in chunks:
            if chunk.samples:
                chunk.request.on_device = True
        return chunks, Step(new_pages, [], [], batch)

    def _compute(self, step: Step) -> tuple[torch.Tensor, LogitsAt]:
        """The likeliest tokens of the sequences that sample, written into the table too, and the way to their logits.

        Replays a graph, or launches kernel by kernel.
        """
        if step.batch is None:
            assert self._graphs is not None
            self._decoded = decoded = self._graphs.replay(step.rows, step.positions, step.new_pages)
            return decoded.token_ids, lambda at: decoded.logits[at]
        self._decoded = None
        states = step.batch.states
        if self._states is None or states is None:
            return self._compute_batch(step.batch, step.new_pages)
        self._states.restore(states)
        computed = self._compute_batch(step.batch, step.new_pages)
        self._states.keep(states)
        return computed

    def _compute_batch(self, batch: Batch, new_pages: NewPages) -> tuple[torch.Tensor, LogitsAt]:
        size = None if self._prompt_graphs is None else self._prompt_graphs.size_for(batch)
        if self._prompt_graphs is not None and size is not None:
            hidden, token_ids = self._prompt_graphs.replay(batch, size, new_pages)
            return token_ids, lambda at: self.model.logits(hidden[at])
        if new_pages.rows:
            self._write_pages(new_pages)
        last_tokens, sample_rows = to_device_together([batch.last_tokens, batch.sample_rows], self.device)
        logits = self.model.logits(self._forward(batch)[last_tokens])
        token_ids = self.likeliest(logits)
        self._last_token.index_copy_(0, sample_rows, token_ids)
        return token_ids, lambda at: logits[at]

    def _forward(self, batch: Batch) -> torch.Tensor:
        """[tokens, hidden_size] of a step. Slots and page tables are built on the device from the rows."""
        token_ids, positions, token_rows, places, rows, starts, unread_tokens, unread_rows = to_device_together(
            [
                batch.token_ids,
                batch.positions,
                batch.token_rows,
                batch.places,
                batch.rows,
                batch.starts,
                batch.unread_tokens,
                batch.unread_rows,
            ],
            self.device,
        )
        if batch.unread_tokens:
            token_ids[unread_tokens] = self._last_token[unread_rows]
        state_slots = first_tokens = chunks = rows.new_empty(0)
        if self._states is not None and batch.states is not None:
            state_slots, first_tokens, chunks = self._states.begin(batch.states, rows)
        segments = Segments(
            page_table=self._page_table,
            rows=rows,
            starts=starts,
            slots=self._slots(token_rows, positions),
            decodes=batch.decodes,
            tiles=to_device(batch.tiles, torch.int32, self.device),
            places=places,
            groups=batch.groups,
            state_slots=state_slots,
            first_tokens=first_tokens,
            chunks=chunks,
        )
        return self.model(token_ids, positions, self.caches, segments)

    def _decode_step(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One new token for each row, from the device's tables alone: logits and greedy tokens.

        Padding has position -1: it attends to nothing and stores nothing; its recurrent state is the null slot's.
        """
        nothing = positions.new_empty(0)
        segments = Segments(
            page_table=self._page_table,
            rows=rows,
            starts=positions,
            slots=nothing,
            decodes=rows.shape[0],
            tiles=nothing,
            places=nothing,
            groups=[],
            state_slots=nothing if self._states is None else self._states.slots(rows),
            first_tokens=nothing,
            chunks=nothing,
        )
        hidden = self.model(self._last_token[rows], positions, self.caches, segments)
        logits = self.model.logits(hidden, None if self._logits is None else self._logits[: len(rows)])
        return logits, self.likeliest(logits)

    def _padded_step(self, inputs: PaddedInputs, size: Size) -> tuple[torch.Tensor, torch.Tensor]:
        """A step with prompts from the device's tables and `inputs` alone: the hidden states of the tokens that choose,
        and what they choose, which goes into the table too."""
        rows, positions = inputs.token_rows, inputs.positions
        if self._states is not None:
            self._states.note(inputs.rows, inputs.state_slots)
        segments = Segments(
            page_table=self._page_table,
            rows=inputs.rows,
            starts=inputs.starts,
            slots=self._slots(rows, positions),
            decodes=size.decodes,
            tiles=inputs.tiles.view(torch.int32).view(-1, 4),
            places=positions.new_empty(0),
            groups=[],
            state_slots=inputs.state_slots,
            first_tokens=inputs.first_tokens,
            chunks=inputs.pieces.view(torch.int32).view(-1, 2),
        )
        token_ids = torch.where(inputs.token_ids < 0, self._last_token[rows], inputs.token_ids)
        hidden = self.model(token_ids, positions, self.caches, segments)[inputs.last_tokens]
        chosen = self.likeliest(self.model.logits(hidden))
        self._last_token.index_copy_(0, inputs.sample_rows, chosen)
        return hidden, chosen

    def _slots(self, rows: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self._page_table[rows, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE

    def _write_pages(self, new: NewPages) -> None:
        rows, columns, pages = to_device_together(new, self.device)
        self._page_table[rows, columns] = pages

    def _tensor(self, values: list[int]) -> torch.Tensor:
        return to_device(values, torch.int64, self.device)


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory


def _caches(
    model: Decoder, shape: tuple[int, ...], dtype: torch.dtype, states: StateCache | None
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One pair for each layer, in order: pages of keys and of values, or (conv_states, states) of a recurrent layer."""
    device, recurrent = model.embedding.device, sorted(model.recurrent_layers())

    def pages() -> torch.Tensor:
        # Zeros, not whatever was there: a masked key still takes part as 0 * value, and 0 * NaN is NaN.
        return torch.zeros(shape, dtype=dtype, device=device)

    if states is None:
        return [(pages(), pages()) for _ in range(model.config.num_hidden_layers)]
    return [
        states.layer(recurrent.index(layer)) if layer in recurrent else (pages(), pages())
        for layer in range(model.config.num_hidden_layers)
    ]
