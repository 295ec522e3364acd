"""Decides how many drafts the steps of an engine have, and reports what they yield."""

from __future__ import annotations

import sys
from array import array

from meltcore.engine.core.chunk import UNKNOWN_DRAFT, Chunk, prompt_tokens
from meltcore.engine.core.scheduler import Scheduler
from meltcore.engine.core.speculation import DraftCounts, SpeculationController
from meltcore.engine.worker.launched_step import LaunchedStep
from meltcore.engine.worker.model_runner import ModelRunner
from meltcore.settings.speculation import MAX_DRAFTS, SpeculativeConfig


class Speculation:
    """Has drafts checked in the steps in which they pay."""

    def __init__(self, config: SpeculativeConfig) -> None:
        self._num_drafts = config.num_speculative_tokens
        self._controller = SpeculationController(self._num_drafts)
        self._counts = DraftCounts(self._num_drafts)
        if config.synthetic_acceptance_length is not None:
            print("meltcore: drafts are accepted at random, so texts are not the model's", file=sys.stderr, flush=True)

    def begin(self, scheduler: Scheduler) -> int:
        """Return the number of drafts that each sequence may have in the next step.

        Steps with prompts are not measured. They have drafts where these are known to pay.
        """
        decodes = [request for request in scheduler.running if request.num_remaining <= 1]
        if not any(request.sampling.speculative_decoding for request in decodes):
            return 0
        if scheduler.waiting_count or len(decodes) < len(scheduler.running):
            return self._controller.in_use(len(decodes))
        return self._controller.begin(len(decodes))

    def follow(self, step: LaunchedStep, scheduler: Scheduler, runner: ModelRunner) -> list[Chunk]:
        """Schedule windows after those of a step in flight. Only the device knows their drafts and where they start.

        Return no chunks if the step must be read first: a request needs the host before its next token, another one may
        start, the windows are no graph, or pages are missing for them if all drafts in flight are accepted.
        """
        before = {chunk.request: chunk for chunk in step.chunks if chunk.samples}
        requests = [request for request in scheduler.running if request not in before or scheduler.has_next(request)]
        sizes = [1 + self._num_drafts * request.sampling.speculative_decoding for request in requests]
        if (
            sum(sizes) == len(sizes)
            or (scheduler.waiting_count and scheduler.free_rows)
            or not all(request in before and request.can_follow for request in requests)
            or not runner.can_follow(len(sizes), sum(sizes))
        ):
            return []
        for request, size in zip(requests, sizes, strict=True):
            end = len(request.token_ids) + len(before[request].drafts) + size
            request.num_computed_tokens = request.length - 1  # at least, which pages of sliding windows depend on
            if end > scheduler.max_model_len or (end > request.capacity and not scheduler.allocate_pages(request, end)):
                return []
        if scheduler.pacer is not None:
            scheduler.pacer.begin(is_decoding=True)
            scheduler.pacer.end(0)
        for request in requests:
            request.in_flight += 1
            request.num_computed_tokens = request.length - 1
        drafts = [(UNKNOWN_DRAFT,) * (size - 1) for size in sizes]
        return [Chunk(each, 0, 1 + len(some), True, drafts=some) for each, some in zip(requests, drafts, strict=True)]

    def record(self, step: LaunchedStep, sampled: list[list[int]], took_s: float | None) -> None:
        """Count the drafts of a step that has ended, and compare its time with the times of other steps.

        `sampled` has the tokens of each request that the step sampled. The time is None if it is not known.
        """
        if step.outcomes is not None:
            drafts = {chunk.request: chunk.drafts for chunk in step.chunks}
            for request, num_tokens in zip(step.requests, step.outcomes[:, 0].tolist(), strict=True):
                self._counts.add(len(drafts[request]), num_tokens - 1)
        chunks = [chunk for chunk in step.chunks if chunk.samples]
        may_have_drafts = any(chunk.request.sampling.speculative_decoding for chunk in chunks)
        if took_s and may_have_drafts and not prompt_tokens(step.chunks):
            num_drafts = 0 if step.windows is None else self._num_drafts
            change = self._controller.record(took_s, len(chunks), num_drafts, sum(map(len, sampled)))
            if change is not None:
                print(f"meltcore: {change}", file=sys.stderr, flush=True)

    def packed(self) -> bytes:
        """Return how many drafts were checked at each position of a window, and then how many were accepted."""
        unused = [0] * (MAX_DRAFTS - self._num_drafts)
        return array("d", [*self._counts.drafted, *unused, *self._counts.accepted, *unused]).tobytes()
