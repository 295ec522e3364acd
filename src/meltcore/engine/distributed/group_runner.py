"""Runs a model on every rank of a group. Rank 0 sends each step to the other ranks, and all ranks compute it.

Each rank has the logits of its part of the vocabulary. For greedy tokens, and for tokens sampled by temperature alone,
ranks exchange one candidate per row. Rows that need more (top-k, log-probabilities, penalties, ...) are gathered on
rank 0, which samples them and broadcasts the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from meltcore.common.errors import RankError
from meltcore.engine.core.batch import Step
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.request import Request
from meltcore.engine.distributed.rank_messages import SamplingStep
from meltcore.engine.distributed.ranks import Ranks
from meltcore.engine.worker.caches import ModelRunnerConfig
from meltcore.engine.worker.launched_step import Event, LaunchedStep
from meltcore.engine.worker.model_runner import LogitsAt, ModelRunner, PrepareSampling
from meltcore.engine.worker.sampler import Drafts, Sampler, SampleResult, positions_of
from meltcore.engine.worker.transfer import to_device, to_device_together
from meltcore.kernels.sampling.draw import argmax_candidates, candidate_tokens, sampled_candidates
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.models.checkpoints.checkpoint import Progress
from meltcore.models.decoders.model import Model


class GroupRunner(ModelRunner):
    """The model runner of one rank of a group. Rank 0 calls `launch`, the other ranks call `follow`."""

    # Ranks share the computation of a step, but each launches all of it.
    max_graph_tokens = 16384
    samples_in_graphs = False  # the candidates of ranks are compared between kernels
    drafts_are_followed = False  # rank 0 alone drafts by n-gram

    def __init__(
        self,
        model: Model,
        sampler: Sampler,
        config: ModelRunnerConfig,
        cache_dtype: torch.dtype,
        group: TensorParallelGroup,
        ranks: Ranks | None = None,
    ) -> None:
        """Create the runner. `ranks` are the other ranks, or None on ranks other than 0."""
        super().__init__(model, sampler, config, cache_dtype)
        self._group = group
        self._ranks = ranks  # None on other ranks, and while this rank launches without collectives
        self._failure: BaseException | None = None  # of sampling in the step being launched

    def capture_graphs(self, progress: Progress, *, prefill: bool, capture_all: bool = False) -> None:
        """Capture graphs on all ranks."""
        if self._ranks is None:
            super().capture_graphs(progress, prefill=prefill, capture_all=capture_all)
            return
        self._ranks.capture_graphs()
        with self._ranks.attribute_failures():
            super().capture_graphs(progress, prefill=prefill, capture_all=capture_all)

    def launch(self, scheduled: list[Chunk], prepare_sampling: PrepareSampling | None = None) -> LaunchedStep:
        """Start a step on all ranks."""
        with nullcontext() if self._ranks is None else self._ranks.attribute_failures():
            launched = super().launch(scheduled, prepare_sampling)
        # Raised within the context, it would be attributed to a rank, and the group aborted.
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        return launched

    def _capture_prefill_graphs(self, progress: Progress, capture_all: bool) -> None:
        super()._capture_prefill_graphs(progress, capture_all)
        if self._prefill_graphs is not None:
            self._prefill_graphs.on_all_ranks = self._on_all_ranks

    def _on_all_ranks(self, is_true: bool) -> bool:
        """Return whether `is_true` on all ranks. All must call it."""
        is_false = to_device([not is_true], torch.int64, self.device)
        return not self._group.all_reduce_max(is_false).item()

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        """Return a context in which this rank launches without the other ranks, for warm-up."""
        ranks, self._ranks = self._ranks, None
        try:
            with self._group.without_collectives():
                yield
        finally:
            self._ranks = ranks

    @torch.inference_mode()
    def follow(self, step: Step, sampling: SamplingStep) -> None:
        """Compute a step that rank 0 has sent."""
        token_ids, logits_at = self._compute(step)
        self._propose_by_mtp(step, self._sample(logits_at, token_ids, sampling, [], None).token_ids)

    def argmax(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the argmax over all ranks' logits, [rows] int64."""
        return candidate_tokens(self._group.all_reduce_max(argmax_candidates(logits, self._first_token(logits))))

    def all_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the logits of all ranks, gathered on rank 0. Returns None on the other ranks."""
        return self._group.gather(logits)

    def _run(
        self,
        step: Step,
        requests: list[Request],
        prepare_sampling: PrepareSampling | None,
        drafts: Drafts | None,
    ) -> SampleResult:
        sampling = self._sampling_step(requests, drafts)
        if self._ranks is not None:
            self._ranks.run(step, sampling)
        token_ids, logits_at = self._compute(step)
        if prepare_sampling is not None:
            self._prepare(requests, prepare_sampling)
        return self._sample(logits_at, token_ids, sampling, requests, drafts)

    def _prepare(self, requests: list[Request], prepare_sampling: PrepareSampling) -> None:
        """Prepare sampling. The other ranks sample in any case, so only their own failure ends the step here."""
        try:
            prepare_sampling(requests, self._record_event)
        except RankError:
            raise
        except BaseException as error:
            self._failure = error

    def _record_event(self) -> Event | None:
        event = super()._record_event()
        return None if event is None or self._ranks is None else _RankCheckingEvent(event, self._ranks)

    def _sampling_step(self, requests: list[Request], drafts: Drafts | None) -> SamplingStep:
        shard_indices: list[int] = []
        gathered_indices: list[int] = []
        for index, request in enumerate(requests):
            # Gathering whole rows is expensive, so once end tokens are allowed, each rank's candidates are used again.
            if not (request.is_unmasked_greedy or (request.is_greedy and not request.masks_end_tokens)):
                (shard_indices if _is_plain_temperature(request) else gathered_indices).append(index)
        shard_requests = [requests[index] for index in shard_indices]
        shard_drafts = None if drafts is None else [drafts[index] for index in shard_indices]
        return SamplingStep(
            shard_indices=shard_indices,
            shard_rows=[request.row for request in shard_requests],
            seeds=[self.sampler.seed_of(request) for request in shard_requests],
            positions=positions_of(shard_requests, shard_drafts),
            temperatures=[request.sampling.temperature for request in shard_requests],
            gathered_indices=gathered_indices,
            gathered_rows=[requests[index].row for index in gathered_indices],
        )

    def _sample(
        self,
        logits_at: LogitsAt,
        token_ids: torch.Tensor,
        sampling: SamplingStep,
        requests: list[Request],
        drafts: Drafts | None,
    ) -> SampleResult:
        """Replace the greedy `token_ids` of requests that are not greedy, in place.

        On ranks other than 0 `requests` is empty.
        """
        if sampling.shard_indices:
            self._draw(logits_at, token_ids, sampling)
        if not sampling.gathered_indices:
            return SampleResult(token_ids, [], None)
        indices, rows = to_device_together([sampling.gathered_indices, sampling.gathered_rows], self.device)
        all_rank_logits = self.all_logits(logits_at(indices))
        if all_rank_logits is None:
            sampled_result = SampleResult(torch.empty_like(indices), [], None)
        else:
            sampled_result = self._sample_on_rank_0(
                all_rank_logits,
                [requests[index] for index in sampling.gathered_indices],
                None if drafts is None else [drafts[index] for index in sampling.gathered_indices],
            )
        token_ids[indices] = self._last_token[rows] = self._group.broadcast(sampled_result.token_ids)
        return SampleResult(
            token_ids, [sampling.gathered_indices[row] for row in sampled_result.logprob_rows], sampled_result.logprobs
        )

    def _sample_on_rank_0(self, logits: torch.Tensor, requests: list[Request], drafts: Drafts | None) -> SampleResult:
        """Sample from whole rows of logits.

        Returns zeros after a failure, for example of a user's token mask or by Ctrl-C. The other ranks wait for tokens.
        With any tokens they are ready for the next step, and `launch` raises the error.
        """
        try:
            return self.sampler.sample(logits, requests, drafts)
        except BaseException as error:
            self._failure = error
            return SampleResult(torch.zeros(len(requests), dtype=torch.int64, device=self.device), [], None)

    def _draw(self, logits_at: LogitsAt, token_ids: torch.Tensor, sampling: SamplingStep) -> None:
        indices, rows, seeds, positions = to_device_together(
            [sampling.shard_indices, sampling.shard_rows, sampling.seeds, sampling.positions], self.device
        )
        temperatures = to_device(sampling.temperatures, torch.float32, self.device)
        logits = logits_at(indices)
        local_candidates = sampled_candidates(logits, temperatures, seeds, positions, self._first_token(logits))
        token_ids[indices] = self._last_token[rows] = candidate_tokens(self._group.all_reduce_max(local_candidates))

    def _first_token(self, logits: torch.Tensor) -> int:
        return self._group.rank * logits.shape[1]


class _RankCheckingEvent:
    """A CUDA event. Waiting for it also checks the other ranks."""

    def __init__(self, event: Event, ranks: Ranks) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._event, self._ranks = event, ranks

    def synchronize(self) -> None:
        self._ranks.wait(self._event)

    def query(self) -> bool:
        is_done: bool = self._event.query()
        return is_done


def _is_plain_temperature(request: Request) -> bool:
    """Return whether sampling only needs a temperature: no filters, and no changed logits or log-probabilities."""
    sampling = request.sampling
    return (
        sampling.temperature > 0
        and (sampling.top_k, sampling.top_p, sampling.min_p) == (0, 1.0, 0.0)
        and not sampling.needs_logits
        and not request.masks_end_tokens
        and request.token_mask is None
    )
