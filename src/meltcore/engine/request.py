"""One sequence inside the engine, and the pages it holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

import torch

from meltcore.engine.messages import AddRequest, FinishReason, TokenLogprobs
from meltcore.engine.sampling_params import SamplingParams

# Given the generated token ids so far, which tokens may come next ([vocab] bool), or None for all of them.
TokenMask = Callable[[Sequence[int]], torch.Tensor | None]


class State(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """The scheduler's view of a sequence.

    `token_ids` are the prompt and the generated tokens the host has read; `in_flight` counts sampled tokens it has not
    read yet (one at most per step launched ahead); `computed` counts tokens whose keys and values are written, or will
    be once the steps launched so far have run.
    """

    def __init__(self, message: AddRequest, order: int, stop_ids: frozenset[int], token_mask: TokenMask | None) -> None:
        self.id = message.request_id
        self.sampling = message.sampling
        # Four bytes a token instead of a list's forty: ten thousand prompts waiting would be hundreds of megabytes.
        self.token_ids = message.prompt
        self.prompt_length = len(self.token_ids)
        # Lower runs earlier; what was preempted keeps its place.
        self.rank = (message.priority, order)
        self.order = order
        self.stop_ids = stop_ids
        self.token_mask = token_mask
        self.state = State.WAITING
        self.in_flight = 0
        self.computed = 0
        self.pages: list[int] = []
        self.page_keys: list[bytes] = []  # prefix-cache keys of the first full pages
        self.registered_pages = 0  # how many of them the prefix cache has seen
        self.sent_pages = 0  # how many of them the device's page table holds
        self.state_slot = 0  # where its recurrent state is; 0, the null slot, while it is not running
        self.stops: list[int] = []  # positions at which its prompt is cut to take a snapshot of its state, ascending
        self.goes_on_from: bytes | None = None  # the key of the page whose snapshot it began from
        self.row = -1
        self.penalised = message.sampling.penalised
        self.penalty_slot = -1  # where its tokens are counted while it runs; only where it is penalised
        self.counted = False  # that slot holds its tokens
        self.on_device = False  # its newest token is in its row of the device's table
        self.takes_likeliest = _takes_likeliest(message.sampling) and token_mask is None  # of those that may come next
        self.plain_greedy = self.takes_likeliest and (message.sampling.min_tokens == 0 or not stop_ids)
        self.cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.arrived_s = message.arrived_s
        self.scheduled_s = 0.0
        self.first_token_s = 0.0

    @property
    def length(self) -> int:
        """Tokens that exist, those not read yet included."""
        return len(self.token_ids) + self.in_flight

    @property
    def generated(self) -> int:
        return self.length - self.prompt_length

    @property
    def may_not_end(self) -> bool:
        """Whether end tokens are forbidden for the token being chosen, which is in flight."""
        return bool(self.stop_ids) and self.generated <= self.sampling.min_tokens

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :].tolist()

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return self.length - self.computed

    @property
    def needs_host(self) -> bool:
        """Whether the next token depends on a decision the host makes from the last one."""
        return self.token_mask is not None


def _takes_likeliest(sampling: SamplingParams) -> bool:
    """Whether the likeliest token, by the model's own logits, is all that a step has to find."""
    return sampling.temperature == 0.0 and sampling.logprobs is None and not sampling.penalised


class Sampled:
    """What a step chose for one request."""

    __slots__ = ("logprobs", "token_id")

    def __init__(self, token_id: int, logprobs: TokenLogprobs | None = None) -> None:
        self.token_id = token_id
        self.logprobs = logprobs
