"""Represents one sequence inside the engine, and the memory that it holds."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING

from meltcore.protocol.generation import AddRequest, FinishReason, RequestTimes, SequenceOutput, TokenLogprobs

if TYPE_CHECKING:
    import torch

    from meltcore.engine.core.constraint import Constraint

# From the generated token ids so far: which tokens may come next ([vocab] bool), or None for all of them.
TokenMask = Callable[[Sequence[int]], "torch.Tensor | None"]


class RequestStatus(Enum):
    """The state of a request in the scheduler, which gets it once its grammar is compiled."""

    COMPILING = "compiling"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """The scheduler's record of a sequence.

    `token_ids` are the prompt and the generated tokens that the host has read. `in_flight` is the number of sampled
    tokens that the host has not read yet, at most one per step launched ahead. `num_computed_tokens` counts the tokens
    whose keys and values are written, or will be when all launched steps have run.
    """

    def __init__(
        self,
        message: AddRequest,
        arrival: int,
        stop_ids: frozenset[int],
        token_mask: TokenMask | None,
        leader: Request | None = None,
    ) -> None:
        """Create a waiting request. `arrival` is the position of the request in the order of arrival.

        A `leader` is an earlier request with the same prompt, whose pages this request waits for. The message may lack
        the prompt then. Raises OverflowError for a token id of more than 32 bits.
        """
        self.id = message.request_id
        self.sampling = message.sampling
        # An array takes 4 bytes per token, a list 40: 10,000 waiting prompts would take hundreds of megabytes.
        if leader is None or message.prompt_token_ids:
            self.token_ids = message.prompt
        else:
            self.token_ids = leader.token_ids[: leader.prompt_length]
        self.prompt_length: int = len(self.token_ids)
        # Lower is scheduled earlier. A preempted request keeps its priority.
        self.priority = (message.priority, arrival)
        self.arrival = arrival
        self.leader = leader
        self.stop_ids = stop_ids
        self.token_mask = token_mask
        self.constraint: Constraint | None = None  # of a request with a grammar, once the grammar is compiled
        self.is_held = False  # the mask of its next token is late
        self.status = RequestStatus.WAITING
        self.in_flight = 0
        self.num_computed_tokens = 0
        self.pages: list[int] = []  # column by column (kv_cache.PageLayout)
        # Up to this length it needs no page, and none has slid out of a window.
        self.capacity = 0
        self.first_columns: list[int] = []  # per sliding group: the first column whose pages it still holds
        self.page_hashes: list[bytes] = []  # of its first full columns
        self.registered_columns = 0  # how many of them the prefix cache has seen
        self.sent_pages = 0  # how many of its pages the device's page table holds
        self.recurrent_slot = 0  # of its recurrent state; 0, the null slot, while it is not running
        self.snapshot_positions: list[int] = []  # ascending: where its prompt is cut to take a recurrent-state snapshot
        self.parent_snapshot: bytes | None = None  # the page hash of the snapshot that it was started from
        self.row = -1
        self.has_penalties = message.sampling.has_penalties
        self.penalty_slot = -1  # where its tokens are counted while it runs, if it has penalties
        self.is_counted = False  # that slot holds the counts of its tokens
        self.last_token_on_device = False  # its newest token is in its row of the device's table
        self.drafts: tuple[int, ...] = ()  # guesses of the tokens that follow, for the next step
        self.num_in_history = 0  # of its tokens, those that the drafter knows, while its row has its history
        # Sampling only needs the argmax of the model's unchanged logits.
        self.is_greedy = self.sampling.temperature == 0.0 and not self.sampling.needs_logits and token_mask is None
        # Greedy, and no end token is ever masked: the argmax of the unchanged logits is always its next token.
        self.is_unmasked_greedy = self.is_greedy and (message.sampling.min_tokens == 0 or not stop_ids)
        # A decode step samples it in a graph: it needs a mask, a temperature and noise at most.
        self.is_graph_sampled = self.is_unmasked_greedy or not (
            self.has_penalties
            or message.sampling.logit_bias
            or message.sampling.logprobs is not None
            or message.sampling.is_filtered
            or token_mask is not None
            or (message.sampling.min_tokens and stop_ids)
        )
        biases = self.sampling.logit_bias
        # Token ids and what is added to their logits.
        self.biases = (array("q", biases), array("f", biases.values())) if biases else None
        self.cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs] = []  # of prompt tokens 1 and up, those known so far
        self.finish_reason: FinishReason | None = None
        self.error: str | None = None  # why it ends with the reason "error"
        self.error_code: str | None = None
        self.stop_token_id: int | None = None  # the end or stop token that finished it
        self.arrived_s = message.arrived_s
        self.scheduled_s = 0.0
        self.first_token_s = 0.0

    @property
    def length(self) -> int:
        """The number of tokens, including tokens in flight."""
        return len(self.token_ids) + self.in_flight

    @property
    def num_generated(self) -> int:
        """The number of generated tokens, including tokens in flight."""
        return self.length - self.prompt_length

    @property
    def masks_end_tokens(self) -> bool:
        """Whether end tokens are forbidden for the token that is being sampled."""
        return bool(self.stop_ids) and self.num_generated <= self.sampling.min_tokens

    @property
    def can_follow(self) -> bool:
        """Whether its next tokens can be sampled before the host knows how many of its drafts were accepted."""
        num_known = len(self.token_ids) - self.prompt_length
        needs_tokens = self.has_penalties or self.token_mask is not None or self.sampling.grammar is not None
        return not needs_tokens and (not self.stop_ids or num_known >= self.sampling.min_tokens)

    @property
    def output_ids(self) -> list[int]:
        """The generated token ids that the host has read."""
        return self.token_ids[self.prompt_length :].tolist()

    @property
    def skips_prefix_cache(self) -> bool:
        """Whether the prefix cache is not used, as prompt log-probabilities need the logits of every prompt token."""
        return self.sampling.prompt_logprobs is not None

    @property
    def num_remaining(self) -> int:
        """The number of tokens that must be computed before the next token can be sampled."""
        return self.length - self.num_computed_tokens

    def last_output(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> SequenceOutput:
        """Return the output that ends the request, now, with its newest tokens."""
        return SequenceOutput(
            self.id,
            token_ids,
            finish_reason=self.finish_reason or "abort",
            stop_token_id=self.stop_token_id,
            logprobs=logprobs,
            cached_tokens=self.cached_tokens,
            error=self.error,
            times=RequestTimes(self.arrived_s, self.scheduled_s, self.first_token_s, time.monotonic()),
            error_code=self.error_code,
        )
