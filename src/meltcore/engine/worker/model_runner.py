"""Runs the steps of a model on a device: page table, forward pass and sampling."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

from meltcore.engine.core.batch import (
    Batch,
    BatchBuilder,
    MtpInputs,
    NewPages,
    Step,
    sort_longest_first,
    take_new_pages,
)
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.kv_cache import PAGE_SIZE
from meltcore.engine.core.request import Request
from meltcore.engine.memory.graph_sizes import MAX_GRAPH_TOKENS, capture_sizes
from meltcore.engine.memory.workspace import LOGIT_BYTES
from meltcore.engine.worker.caches import ModelRunnerConfig, PageTables, RecurrentStateCache, allocate_caches
from meltcore.engine.worker.cuda_graphs import DecodeGraphs, DecodeOutput
from meltcore.engine.worker.drafter import Drafter, NgramDrafter
from meltcore.engine.worker.launched_step import (
    MAX_LAYERS_IN_FLIGHT,
    Event,
    LaunchedStep,
    LayerYield,
    PromptLogprobs,
    score_prompts,
)
from meltcore.engine.worker.mtp_drafter import MtpDrafter, StepStates
from meltcore.engine.worker.prefill_graphs import GraphBucket, PaddedInputs, PrefillGraphs, graph_buckets
from meltcore.engine.worker.sampler import Drafts, Sampler, SampleResult
from meltcore.engine.worker.transfer import cuda_event, to_device, to_device_together, to_host
from meltcore.kernels.attention.metadata import AttentionMetadata
from meltcore.kernels.memory_pools import memory_pool
from meltcore.kernels.sampling.argmax import argmax
from meltcore.models.checkpoints.checkpoint import Progress
from meltcore.models.decoders.kv_cache_specs import group_layers
from meltcore.models.decoders.model import Model, MtpModel
from meltcore.settings.speculation import SpeculativeConfig

# On GPUs of less memory the largest prefill graph has an eighth of the tokens: they cannot spare its memory.
_LARGE_BYTES = 32 * 2**30

# Gets the requests that a step samples, and a function that records an event after its forward pass (None on a CPU).
PrepareSampling = Callable[[list[Request], Callable[[], Event | None]], None]
# From indices of sampled rows ([rows] int64 on the device, or a slice) to their logits [rows, vocab] float32.
LogitsAt = Callable[[torch.Tensor | slice], torch.Tensor]


class ModelRunner:
    """Holds the caches, and a row per running sequence: its pages, its recurrent-state slot and its newest token."""

    max_graph_tokens = MAX_GRAPH_TOKENS
    samples_in_graphs = True
    drafts_are_followed = True  # every drafter knows all tokens

    def __init__(self, model: Model, sampler: Sampler, config: ModelRunnerConfig, cache_dtype: torch.dtype) -> None:
        self.model, self.sampler, self.device = model, sampler, model.device
        rows = config.max_num_seqs + 1  # row 0 is for padding
        groups = group_layers(model.kv_cache_specs())
        self.recurrent_states: RecurrentStateCache | None = None
        with memory_pool("kv_cache"):
            if groups.recurrent is not None:
                self.recurrent_states = RecurrentStateCache(
                    groups.recurrent,
                    len(groups.recurrent_layers),
                    slots=config.recurrent_slots,
                    rows=rows,
                    dtype=model.dtype,
                    device=self.device,
                    window=config.window,
                )
            pages = config.pages + 1  # page 0 is for padding
            self.caches = allocate_caches(groups, pages, PAGE_SIZE, cache_dtype, self.device, self.recurrent_states)
        self.kv_cache_dtype = self.caches[groups.attention[0].layers[0]][0].dtype
        self._config, self._batches = config, BatchBuilder(has_recurrent=self.recurrent_states is not None)
        self.page_tables = PageTables(groups, len(self.caches), config, self.device)
        self._last_token = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._decode_graphs: DecodeGraphs | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        self._decoded: DecodeOutput | None = None  # of the newest step, if a decode graph ran it
        self._logits: torch.Tensor | None = None  # [sequences, vocab], which decode graphs write
        self._prompt_logprobs: PromptLogprobs | None = None  # of the newest step
        self._wait_in_step: Callable[[], float] | None = None
        self._longest_whole = 0  # tokens of a step that does not wait between its layers
        self._layer_yield: LayerYield | None = None  # of the newest step
        self.drafter: Drafter | None = None
        self._mtp: MtpDrafter | None = None
        self.proposes_drafts = False  # in the next step
        self._window_positions: torch.Tensor | None = None  # of the newest step, if only the device knows them

    @property
    def weights(self) -> list[torch.Tensor]:
        """The model's weights."""
        return list(self.model.parameters())

    @property
    def cache_tensors(self) -> list[torch.Tensor]:
        """The caches of all layers."""
        return [tensor for pair in self.caches for tensor in pair]

    def forget_step(self) -> None:
        """Drop the outputs of the last step."""
        self._decoded = self._prompt_logprobs = None

    @property
    def cache_bytes(self) -> int:
        """The bytes of all caches, including the null page and the null slot. Sub-groups share their tensors."""
        return sum({tensor.data_ptr(): tensor.nbytes for pair in self.caches for tensor in pair}.values())

    def capture_graphs(self, progress: Progress, *, prefill: bool, capture_all: bool = False) -> None:
        """Capture CUDA graphs for decode steps, and for short steps with prompts if `prefill`.

        With `capture_all` no graph is captured later, so that the memory of graphs does not grow.
        """
        shape = self._config.max_num_seqs, self.model.local_vocab_size
        with memory_pool("kv_cache"):
            self._logits = torch.empty(shape, dtype=torch.float32, device=self.device)
        graphs = self._make_decode_graphs()
        graphs.capture(progress)
        self._decode_graphs = graphs
        if prefill:
            self._capture_prefill_graphs(progress, capture_all)

    def start_drafts(self, config: SpeculativeConfig, seed: int) -> None:
        """Allocate what speculative decoding needs."""
        sizes = config, self._config, seed, self._last_token
        if config.has_mtp:
            assert isinstance(self.model, MtpModel)
            self.drafter = self._mtp = MtpDrafter(*sizes, self.model, self.caches[-1], self.argmax)
        else:
            self.drafter = NgramDrafter(*sizes)

    def _make_decode_graphs(self) -> DecodeGraphs:
        sizes, resample = capture_sizes(self._config.max_num_seqs), None
        if self.samples_in_graphs:
            self.sampler.prepare_graphs(self._config.max_num_seqs)
            resample = self.sampler.resample
        return DecodeGraphs(self._decode_step, sizes, self._last_token, self.page_tables.flat, resample)

    def _capture_prefill_graphs(self, progress: Progress, capture_all: bool) -> None:
        is_large = torch.cuda.get_device_properties(self.device).total_memory >= _LARGE_BYTES
        max_tokens = min(self.max_graph_tokens // (1 if is_large else 8), self._config.max_num_batched_tokens)
        buckets = graph_buckets(self._config.max_num_seqs, max_tokens, self._config.window)
        if buckets:
            if self._mtp is not None:
                self._mtp.keep_hidden_states(buckets[-1].size)
            row_bytes = LOGIT_BYTES * self.model.local_vocab_size
            draft = None if self._mtp is None else self._padded_drafts
            graphs = PrefillGraphs(self._padded_step, buckets, self.page_tables.flat, row_bytes, draft)
            graphs.capture(progress, capture_all=capture_all)
            self._prefill_graphs = graphs

    def drop_graphs(self) -> None:
        """Drop all graphs before a group is destroyed: since 2.26, NCCL waits for the last graph that uses it."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self._decode_graphs = self._prefill_graphs = self._decoded = None
        if self._mtp is not None:
            self._mtp.states = None

    def without_collectives(self) -> AbstractContextManager[None]:
        """Return a context in which no launch needs another rank."""
        return nullcontext()

    @torch.inference_mode()
    def warm_up_decodes(self, counts: list[int]) -> None:
        """Launch padded decode steps of these sizes, for `compile_ahead`."""
        if counts:
            self._make_decode_graphs().warm_up_steps(counts)
        if self._mtp is not None:
            self._mtp.warm_up(counts)

    def reset_last_tokens(self) -> None:
        """Set each row's newest token to 0, since the values after warm-up are not token ids."""
        self._last_token.zero_()

    def put_last_tokens(self, requests: list[Request]) -> None:
        """Write the last tokens that the host knows to the table of the device, after all launched work."""
        rows, token_ids = [request.row for request in requests], [request.token_ids[-1] for request in requests]
        if rows:
            device_rows, device_token_ids = to_device_together([rows, token_ids], self.device)
            self._last_token[device_rows] = device_token_ids
            for request in requests:
                request.last_token_on_device = True

    def yield_between_layers(self, wait: Callable[[], float] | None, longest_whole: int) -> int:
        """Let later steps with prompts call `wait` between their layers if they have more than `longest_whole` tokens.

        These are launched kernel by kernel, since a graph cannot stop. None ends this. Return into how many parts this
        divides a step.
        """
        self._wait_in_step, self._longest_whole = wait, longest_whole
        return 1 if wait is None else max(1, len(self.caches) // MAX_LAYERS_IN_FLIGHT)

    def can_follow(self, num_windows: int, num_tokens: int) -> bool:
        """Return whether a step of windows alone can follow a step with drafts that is in flight."""
        is_whole = self._wait_in_step is None or num_tokens <= self._longest_whole
        graphs = self._prefill_graphs if self.drafts_are_followed and is_whole else None
        return graphs is not None and graphs.holds_windows(num_windows, num_tokens)

    @torch.inference_mode()
    def launch(self, scheduled: list[Chunk], prepare_sampling: PrepareSampling | None = None) -> LaunchedStep:
        """Start a step and return without waiting for the device.

        Between the forward pass and sampling, `prepare_sampling` may wait for what sampling needs.
        """
        chunks, step = self._build_step(scheduled)
        wait, batch = self._wait_in_step, step.batch
        is_long = batch is not None and len(batch.token_ids) > self._longest_whole
        self._layer_yield = LayerYield(wait, self._record_event) if wait is not None and is_long else None
        requests = [chunk.request for chunk in chunks if chunk.samples]
        windows = self._batches.windows(chunks) if self.proposes_drafts and requests else None
        drafts = None if windows is None or len(windows.drafts) == len(requests) else windows.drafts
        if self._mtp is not None and batch is not None:
            step = step._replace(mtp=MtpInputs.of(chunks, windows, self._mtp.max_drafts))
        sampled = requests if windows is None else windows.requests
        result = self._run(step, sampled, prepare_sampling, drafts)
        token_ids = result.token_ids if self._decoded is None else self._decoded.token_ids
        outcomes = self._propose_by_mtp(step, token_ids)
        if windows is not None and self.drafter is not None:
            if isinstance(self.drafter, NgramDrafter):
                outcomes = self.drafter.propose(windows, token_ids)
            assert outcomes is not None, "a step with windows proposes drafts"
            if drafts is not None and any(request.has_penalties for request in requests):
                self.sampler.count(token_ids, windows.requests, self.drafter.used_rows(windows, outcomes))
            outcomes = to_host(outcomes)
            for request in requests:  # until the step is read
                request.num_in_history = len(request.token_ids)
        if self._decoded is not None and all(request.is_unmasked_greedy for request in requests):
            result = SampleResult(self._decoded.host_token_ids, [], None)  # written by the graph
        host_token_ids = result.copy_to_host()
        scores = self._prompt_logprobs
        prompt_logprobs = None if scores is None else (to_host(scores[0]), to_host(scores[1]), to_host(scores[2]))
        return LaunchedStep(
            *(chunks, requests, host_token_ids, self._record_event(), prompt_logprobs),
            yielded_s=None if self._layer_yield is None else self._layer_yield.waited_s,
            windows=windows,
            outcomes=outcomes,
        )

    def sample(
        self, logits_at: LogitsAt, token_ids: torch.Tensor, requests: list[Request], drafts: Drafts | None = None
    ) -> SampleResult:
        """Replace, in place, the greedy `token_ids` [rows] of requests that are not greedy.

        A row may follow drafts, as in `Sampler.sample`.
        """
        rows = [row for row, request in enumerate(requests) if not request.is_unmasked_greedy]
        if not rows:
            return SampleResult(token_ids, [], None)
        sampled_requests, max_rows = [requests[row] for row in rows], self._config.logit_rows
        sampled_drafts = None if drafts is None else [drafts[row] for row in rows]
        row_indices, table_rows = to_device_together([rows, [request.row for request in sampled_requests]], self.device)
        # The noise is of the position after the sampled token.
        positions = None if self._window_positions is None else self._window_positions[row_indices] + 2
        # The logits of all rows are read, and overwritten, where they are.
        has_all = len(rows) == len(requests)
        sampled_result = SampleResult.concatenate(
            [
                self.sampler.sample(
                    logits_at(slice(first, first + max_rows) if has_all else row_indices[first : first + max_rows]),
                    sampled_requests[first : first + max_rows],
                    None if sampled_drafts is None else sampled_drafts[first : first + max_rows],
                    None if positions is None else positions[first : first + max_rows],
                )
                for first in range(0, len(rows), max_rows)
            ]
        )
        token_ids[row_indices] = self._last_token[table_rows] = sampled_result.token_ids
        return SampleResult(token_ids, [rows[row] for row in sampled_result.logprob_rows], sampled_result.logprobs)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the argmax of each row of the model's logits, [rows] int64."""
        return argmax(logits)

    def all_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return logits [rows, vocab] of the whole vocabulary. Returns None on a rank that does not sample."""
        return logits

    def _run(
        self,
        step: Step,
        requests: list[Request],
        prepare_sampling: PrepareSampling | None,
        drafts: Drafts | None,
    ) -> SampleResult:
        """Compute a step and sample. `requests` are the requests of the sampled rows, in the order of the step."""
        token_ids, logits_at = self._compute(step)
        if prepare_sampling is not None:
            prepare_sampling(requests, self._record_event)
        if self._decoded is not None and self._sample_in_graph(self._decoded, requests):
            return SampleResult(self._decoded.host_token_ids, [], None)
        return self.sample(logits_at, token_ids, requests, drafts)

    def _propose_by_mtp(self, step: Step, token_ids: torch.Tensor) -> torch.Tensor | None:
        """Run the layer for multi-token prediction, if the step runs it. Returns the outcomes: see `MtpDrafter`."""
        return None if self._mtp is None or step.mtp is None else self._mtp.propose(step.mtp, token_ids)

    def _sample_in_graph(self, decoded: DecodeOutput, requests: list[Request]) -> bool:
        """Replace the greedy tokens of a decode step by a graph. Return False if it has not replaced any."""
        assert self._decode_graphs is not None
        if (
            all(request.is_unmasked_greedy for request in requests)
            or len(requests) < len(decoded.token_ids)
            or not self.sampler.send_settings(requests)
        ):
            return False
        self._decode_graphs.replay_sampling(len(requests))
        return True

    def _record_event(self) -> Event | None:
        """Record an event after all launched work. Returns None on a CPU, where the work has already ended."""
        if self.device.type != "cuda":
            return None
        event = cuda_event()
        event.record()
        return event

    def _build_step(self, scheduled: list[Chunk]) -> tuple[list[Chunk], Step]:
        """Convert chunks to a `Step`. Returns the chunks in the order of their results, and the step."""
        new_pages = take_new_pages(scheduled, self.page_tables.sub_groups, self.page_tables.rows)
        if (
            self._decode_graphs is not None
            and all(chunk.request.last_token_on_device and not chunk.drafts for chunk in scheduled)
            and not (self.proposes_drafts and self._mtp is not None)  # whose layer needs the hidden states
        ):
            chunks = sort_longest_first(scheduled)
            rows, positions = [chunk.request.row for chunk in chunks], [chunk.start for chunk in chunks]
            return chunks, Step(new_pages, rows, positions, None)
        chunks, batch = self._batches.build(scheduled)
        for chunk in chunks:
            if chunk.samples:  # which of several tokens is the last one, the table shows if the drafter knows it
                chunk.request.last_token_on_device = self.drafts_are_followed or not chunk.drafts
        return chunks, Step(new_pages, [], [], batch)

    def _compute(self, step: Step) -> tuple[torch.Tensor, LogitsAt]:
        """Compute a step. Returns the greedy tokens of the sequences that sample, and a function for their logits.

        The step is a replay of a graph, or is launched kernel by kernel. The greedy tokens are also written to the
        table of last tokens.
        """
        self._prompt_logprobs = self._window_positions = None
        if step.batch is None:
            assert self._decode_graphs is not None
            self._decoded = decoded = self._decode_graphs.replay(step.rows, step.positions, step.new_pages)
            return decoded.token_ids, lambda at: decoded.logits[at]
        self._decoded = None
        recurrent = step.batch.recurrent
        if self.recurrent_states is None or recurrent is None:
            return self._compute_batch(step.batch, step.new_pages, step.mtp)
        self.recurrent_states.restore_snapshots(recurrent)
        output = self._compute_batch(step.batch, step.new_pages, step.mtp)
        self.recurrent_states.take_snapshots(recurrent)
        return output

    def _compute_batch(self, batch: Batch, new_pages: NewPages, mtp: MtpInputs | None) -> tuple[torch.Tensor, LogitsAt]:
        targets = batch.prompt_targets  # a graph returns the hidden states of sampled tokens only
        graphs = None if targets is not None or self._layer_yield is not None else self._prefill_graphs
        if graphs is not None and (bucket := graphs.bucket_for(batch)) is not None:
            hidden, token_ids = graphs.replay(batch, bucket, new_pages, mtp)
            inputs = graphs.inputs(bucket)
            self._window_positions = inputs.positions if batch.is_following else None
            if self._mtp is not None and mtp is not None:
                if mtp.rows and bucket.draft_windows:
                    self._mtp.states = partial(graphs.replay_drafting, bucket, len(mtp.rows))
                else:
                    self._mtp.read_padded(inputs, bucket, batch, self._mtp_metadata(inputs, bucket))
            return token_ids, lambda at: self.model.logits(hidden[at])
        self.page_tables.write(new_pages)
        last_tokens, sample_rows = to_device_together([batch.last_tokens, batch.sample_rows], self.device)
        hidden = self._forward(batch)
        if targets is not None:
            self._prompt_logprobs = score_prompts(
                hidden, targets, lambda rows: self.all_logits(self.model.logits(rows)), self._config.logit_rows
            )
        logits = self.model.logits(hidden[last_tokens])
        token_ids = self.argmax(logits)
        self._last_token.index_copy_(0, sample_rows, token_ids)
        return token_ids, lambda at: logits[at]

    def _forward(self, batch: Batch) -> torch.Tensor:
        """Run the forward pass of a step. Returns hidden states [tokens, hidden_size]."""
        token_ids, positions, metadata = self._device_inputs(batch)
        hidden: torch.Tensor = self.model(token_ids, positions, self.caches, metadata, self._layer_yield)
        if self._mtp is not None:
            self._mtp.states = StepStates(hidden, positions, metadata[-1], batch.last_tokens)
        return hidden

    def _device_inputs(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, list[AttentionMetadata]]:
        """Return token ids and positions [tokens], and each layer's metadata.

        The device computes cache slots from rows and positions.
        """
        others = [batch.rows, batch.context_lens, batch.device_tokens, batch.device_rows]
        token_ids, positions, token_rows, padded_positions, *device_others = to_device_together(
            [batch.token_ids, batch.positions, batch.token_rows, batch.padded_positions, *others], self.device
        )
        rows, context_lens, device_tokens, device_rows = device_others
        if batch.device_tokens:
            token_ids[device_tokens] = self._last_token[device_rows]
        state_slots = first_tokens = chunks = rows.new_empty(0)
        if self.recurrent_states is not None and batch.recurrent is not None:
            state_slots, first_tokens, chunks = self.recurrent_states.attention_inputs(batch.recurrent, rows)
        metadata = self.page_tables.layer_metadata(
            self.recurrent_states,
            self.page_tables.slot_mappings(token_rows, positions),
            num_windows=batch.recurrent.num_windows if batch.recurrent is not None else 0,
            rows=rows,
            context_lens=context_lens,
            num_decodes=batch.num_decodes,
            query_tiles=to_device(batch.tiles, torch.int32, self.device),
            max_tile_queries=batch.max_tile_queries(self._config.window),
            padded_index=padded_positions,
            padded_groups=batch.groups,
            state_slots=state_slots,
            query_start_loc=first_tokens,
            chunk_indices=chunks,
        )
        return token_ids, positions, metadata

    def _decode_step(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute logits and greedy tokens of one new token per row, using only tables on the device.

        Padding has position -1. It attends to nothing, stores nothing, and has the recurrent state of the null slot.
        """
        empty = positions.new_empty(0)
        has_windows = self.recurrent_states is not None and self.recurrent_states.has_windows
        metadata = self.page_tables.layer_metadata(
            self.recurrent_states,
            empty.expand(self.page_tables.sub_groups, 0),
            num_windows=rows.shape[0],
            rows=rows,
            context_lens=positions,
            num_decodes=rows.shape[0],
            query_tiles=empty,
            padded_index=empty,
            padded_groups=[],
            state_slots=empty if self.recurrent_states is None else self.recurrent_states.slots(rows),
            query_start_loc=torch.arange(len(rows) + 1, device=self.device) if has_windows else empty,
            chunk_indices=empty,
        )
        hidden = self.model(self._last_token[rows], positions, self.caches, metadata)
        logits = self.model.logits(hidden, None if self._logits is None else self._logits[: len(rows)])
        return logits, self.argmax(logits)

    def _padded_step(self, inputs: PaddedInputs, bucket: GraphBucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute a step with prompts or drafts, using only `inputs` and tables on the device.

        Returns the hidden states that are sampled, and their greedy tokens, which are also written to the table.
        """
        if self.drafter is not None and bucket.draft_windows:
            self.drafter.follow(inputs)
        if self.recurrent_states is not None:
            self.recurrent_states.set_slots(inputs.rows, inputs.state_slots)
        metadata = self._padded_metadata(inputs, bucket, inputs.state_slots)
        token_ids = torch.where(inputs.token_ids < 0, self._last_token[inputs.token_rows], inputs.token_ids)
        all_hidden = self.model(token_ids, inputs.positions, self.caches, metadata)
        if self._mtp is not None:
            self._mtp.graph_hidden[: len(all_hidden)].copy_(all_hidden)
        hidden = all_hidden[inputs.last_tokens]
        sampled_ids = self.argmax(self.model.logits(hidden))
        self._last_token.index_copy_(0, inputs.sample_rows, sampled_ids)
        return hidden, sampled_ids

    def _padded_drafts(self, inputs: PaddedInputs, bucket: GraphBucket, token_ids: torch.Tensor) -> torch.Tensor:
        """Draft after a padded step of windows alone: see `MtpDrafter.propose_padded`."""
        assert self._mtp is not None
        return self._mtp.propose_padded(inputs, bucket, self._mtp_metadata(inputs, bucket), token_ids)

    def _mtp_metadata(self, inputs: PaddedInputs, bucket: GraphBucket) -> AttentionMetadata:
        return self._padded_metadata(inputs, bucket, inputs.state_slots[:0])[-1]  # the layer is attention

    def _padded_metadata(
        self, inputs: PaddedInputs, bucket: GraphBucket, slots: torch.Tensor
    ) -> list[AttentionMetadata]:
        """Return each layer's metadata of a padded step. `slots` is empty if no recurrent layer runs."""
        return self.page_tables.layer_metadata(
            self.recurrent_states,
            self.page_tables.slot_mappings(inputs.token_rows, inputs.positions),
            num_windows=bucket.num_windows,
            rows=inputs.rows,
            context_lens=inputs.context_lens,
            num_decodes=bucket.num_decodes,
            query_tiles=inputs.tiles.view(torch.int32).view(-1, 4),
            max_tile_queries=bucket.max_tile_queries,
            padded_index=inputs.positions[:0],
            padded_groups=[],
            state_slots=slots,
            query_start_loc=inputs.first_tokens,
            chunk_indices=inputs.chunks.view(torch.int32).view(-1, 2),
        )
