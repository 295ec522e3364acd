"""A step in flight on the device, and how its layers are launched."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from meltcore.engine.core.batch import PromptTargets, Windows, scored_positions
from meltcore.engine.core.chunk import Chunk
from meltcore.engine.core.request import Request, RequestStatus
from meltcore.engine.worker.sampler import SampleResult, select_logprobs
from meltcore.engine.worker.transfer import to_device_together
from meltcore.protocol.generation import TokenLogprobs

# Of a step that yields between its layers: enough for the device to have the next one when it ends one.
MAX_LAYERS_IN_FLIGHT = 2
# Of prompt tokens [n]: their log-probabilities [n], and the highest ones and their ids [n, num_logprobs].
PromptLogprobs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Of each request of a step its sampled tokens, and their log-probabilities by the request's index.
SampledTokens = tuple[list[list[int]], dict[int, list[TokenLogprobs]]]
# Prompt tokens scored in one block: with a vocabulary of 152,000 tokens their float32 logits take 0.3 GB.
_SCORED_TOKENS = 256


class Event(Protocol):
    """A point in the work queued on the device."""

    def synchronize(self) -> None:
        """Wait until the device has passed this point."""

    def query(self) -> bool:
        """Return whether the device has passed this point."""


def score_prompts(
    hidden: torch.Tensor,
    targets: PromptTargets,
    logits_of: Callable[[torch.Tensor], torch.Tensor | None],
    logit_rows: int,
) -> PromptLogprobs | None:
    """Compute log-probabilities of prompt tokens from a step's hidden states [tokens, hidden_size], block by block.

    `logits_of` returns the logits of hidden states, or None on a rank that does not sample: then the result is None. A
    block has at most `logit_rows` tokens.
    """
    tokens, token_ids = to_device_together([targets.tokens, targets.token_ids], hidden.device)
    blocks: list[PromptLogprobs] = []
    block_size = min(logit_rows, _SCORED_TOKENS)
    for token_indices, block_token_ids in zip(
        torch.split(tokens, block_size), torch.split(token_ids, block_size), strict=True
    ):
        logits = logits_of(hidden[token_indices])
        if logits is not None:
            blocks.append(select_logprobs(logits.log_softmax(-1), block_token_ids, targets.num_logprobs))
    if not blocks:
        return None
    logprobs, values, ids = zip(*blocks, strict=True)
    return torch.cat(logprobs), torch.cat(values), torch.cat(ids)


class LaunchedStep(NamedTuple):
    """A step in flight on the device. Of its `requests`, the sampled tokens of the `dropped` ones are not used.

    `yielded_s` is the time for which the step waited between its layers, and None if it could not. `windows` and
    `outcomes` (`Drafter.propose`) are None if the engine does not speculate in this step.
    """

    chunks: list[Chunk]
    requests: list[Request]
    result: SampleResult
    done_event: Event | None
    prompt_logprobs: PromptLogprobs | None = None
    dropped: frozenset[Request] = frozenset()
    yielded_s: float | None = None
    windows: Windows | None = None
    outcomes: torch.Tensor | None = None

    def read(self) -> SampledTokens:
        """Wait for the step.

        Returns the sampled tokens of each of `requests`, and their log-probabilities by index of the request. Prompt
        log-probabilities and the drafts for the next step are written to their requests.
        """
        if self.done_event is not None:
            self.done_event.synchronize()
        if self.prompt_logprobs is not None:
            self._read_prompt_logprobs(*(part.tolist() for part in self.prompt_logprobs))
        if self.windows is None or self.outcomes is None:
            token_ids, logprobs = self.result.read(self.requests)
            return [[token_id] for token_id in token_ids], {index: [each] for index, each in logprobs.items()}
        row_ids, row_logprobs = self.result.read(self.windows.requests)
        sampled: list[list[int]] = []
        logprobs_by_index: dict[int, list[TokenLogprobs]] = {}
        outcomes = zip(self.requests, self.windows.first_rows, self.outcomes.tolist(), strict=False)
        for index, (request, first, (num_tokens, num_drafts, *drafts)) in enumerate(outcomes):
            rows = range(first, first + num_tokens)
            sampled.append(row_ids[rows.start : rows.stop])
            if first in row_logprobs:
                logprobs_by_index[index] = [row_logprobs[row] for row in rows]
            request.drafts = tuple(drafts[:num_drafts])
            request.num_in_history = len(request.token_ids) + num_tokens
        return sampled, logprobs_by_index

    def after_read(self) -> LaunchedStep:
        """Return the step with the drafts that it checks, which are known once the step that it follows was read."""
        chunks = []
        for chunk in self.chunks:
            request, length = chunk.request, len(chunk.request.token_ids)
            most = min(len(chunk.drafts), request.prompt_length + request.sampling.max_tokens - length - 1)
            drafts = request.drafts[: max(0, most)] if request.status is RequestStatus.RUNNING else ()
            chunks.append(chunk._replace(start=length - 1, size=1 + len(drafts), drafts=drafts))
        return self._replace(chunks=chunks)

    def without(self, requests: frozenset[Request]) -> LaunchedStep:
        """Return the step without the sampled tokens of `requests`, either."""
        chunks = [chunk._replace(samples=chunk.samples and chunk.request not in requests) for chunk in self.chunks]
        return self._replace(chunks=chunks, dropped=self.dropped | requests)

    def _read_prompt_logprobs(
        self, logprobs: list[float], values: list[list[float]], token_ids: list[list[int]]
    ) -> None:
        rows = zip(logprobs, token_ids, values, strict=True)
        for chunk in self.chunks:
            positions, num_logprobs = scored_positions(chunk), chunk.request.sampling.prompt_logprobs
            # By position: a preempted request computes the same ones again.
            chunk.request.prompt_logprobs[positions.start : positions.stop] = [
                TokenLogprobs(logprob, ids[:num_logprobs], top_values[:num_logprobs])
                for _, (logprob, ids, top_values) in zip(positions, rows, strict=False)
            ]


class LayerYield:
    """Launches the layers of a step few at a time, and lets engines of higher classes run between two layers.

    Without it the host launches all layers without a wait, and an engine that becomes urgent waits for all of them.
    """

    def __init__(self, wait: Callable[[], float], record_event: Callable[[], Event | None]) -> None:
        """Create the callback of one step. `wait` returns the seconds for which it waited for higher classes."""
        self._wait = wait
        self._record_event = record_event
        self._layers_in_flight: deque[Event] = deque()
        self.waited_s: float | None = None  # None before the first call

    def __call__(self) -> None:
        """Wait until few layers are in flight, and while a higher class is at work."""
        event = self._record_event()
        if event is not None:
            self._layers_in_flight.append(event)
            if len(self._layers_in_flight) > MAX_LAYERS_IN_FLIGHT:
                self._layers_in_flight.popleft().synchronize()
        self.waited_s = (self.waited_s or 0.0) + self._wait()
