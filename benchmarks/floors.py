"""The time that a closed batch of requests cannot go below on one GPU: bytes to be read and products to be computed.

Of a decode step the weights it needs (of routed experts those that choices all alike meet), keys and values once, and
recurrent states read and written. Of prompts the products with weights, or reading these once, whichever is longer.
Prompts and decode steps are added up. Of several GPUs each has its share; what they say to each other is left out.
"""

from __future__ import annotations

from typing import NamedTuple

from attention import matmul_flops_per_us, read_bytes_per_us
from offline_work import Work
from uniform_routing import expected_experts

from meltcore.layers.moe import RoutedMLP
from meltcore.models.cache import split_groups
from meltcore.models.decoder import Decoder

READ = 2**28  # numbers, of four bytes: several times any L2, and little of what an engine leaves free


class Limits(NamedTuple):
    """What this GPU does at best."""

    bytes_per_us: float
    flops_per_us: float

    @classmethod
    def measure(cls) -> Limits:
        return cls(read_bytes_per_us(READ), matmul_flops_per_us())


class Needs(NamedTuple):
    """What one rank's share of a model needs, all layers together.

    step_bytes: weights that every step reads; expert_bytes: of one routed expert; kv_bytes: of a token of context;
    state_bytes: of a sequence, read and written; token_weights: with which a token of a prompt is multiplied;
    head_weights: with which a token is that an answer's token is chosen after.
    """

    step_bytes: float
    expert_bytes: float
    experts: int
    choices: int
    kv_bytes: int
    state_bytes: int
    token_weights: float
    head_weights: int

    @classmethod
    def of(cls, model: Decoder) -> Needs:
        weights = list(model.parameters())
        if not model.config.tie_word_embeddings:
            weights = [weight for weight in weights if weight is not model.embedding]
        routed = [block for block in model.modules() if isinstance(block, RoutedMLP)]
        chosen = [weight for block in routed for weight in (block.gate_up, block.down)]
        experts, choices = (routed[0].experts, routed[0].choices) if routed else (0, 0)
        expert_bytes = sum(weight.nbytes / len(weight) for weight in chosen)
        expert_weights = sum(weight.numel() / len(weight) for weight in chosen)
        pages, states = split_groups(model.cache_groups())
        element_size = model.embedding.element_size()
        return cls(
            step_bytes=sum(weight.nbytes for weight in weights) - experts * expert_bytes,
            expert_bytes=expert_bytes,
            experts=experts,
            choices=choices,
            kv_bytes=pages.page_bytes(1, element_size),
            state_bytes=2 * states.slot_bytes(element_size) if states else 0,
            token_weights=sum(weight.numel() for weight in weights)
            - model.head.numel()
            - (experts - choices) * expert_weights,
            head_weights=model.head.numel(),
        )

    def weight_bytes(self, tokens: float) -> float:
        """Of the weights that a step of so many tokens reads."""
        met = expected_experts(self.experts, self.choices, tokens) if self.experts else 0.0
        return self.step_bytes + met * self.expert_bytes

    def decode_us(self, sequences: int, context: float, limits: Limits) -> float:
        """A step of sequences of so many tokens."""
        read = self.weight_bytes(sequences) + sequences * (context * self.kv_bytes + self.state_bytes)
        computed = 2 * sequences * (self.token_weights + self.head_weights)
        return max(read / limits.bytes_per_us, computed / limits.flops_per_us)

    def prompts_us(self, sequences: int, tokens: float, limits: Limits) -> float:
        """Prompts of so many tokens each."""
        computed = 2 * sequences * (tokens * self.token_weights + self.head_weights)
        read = self.weight_bytes(sequences * tokens)
        return max(read / limits.bytes_per_us, computed / limits.flops_per_us)


def floor_s(needs: Needs, work: Work, at_once: int, limits: Limits) -> float:
    """Seconds of a work of which `at_once` requests run together."""
    prompt = (work.low + work.high) / 2
    rounds, rest = divmod(work.requests, at_once)
    total_us = 0.0
    for times, sequences in ((rounds, at_once), (1, rest)):
        if times and sequences:
            decode_us = sum(needs.decode_us(sequences, prompt + done, limits) for done in range(1, work.out))
            total_us += times * (needs.prompts_us(sequences, prompt, limits) + decode_us)
    return total_us / 1e6
