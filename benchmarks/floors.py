"""The least time of a closed batch of requests on a GPU, from the bytes to be read and the GEMMs to be computed.

A decode step reads its weights (of experts, those that uniform routing selects) and its keys and values once, and
reads and writes recurrent states. Prefill takes as long as its GEMMs or as reading the weights once.
Prefill and decode steps are added. With several GPUs each reads its shard; communication is not counted.
"""

from __future__ import annotations

from typing import NamedTuple

from attention import matmul_flops_per_us, read_bytes_per_us
from offline_work import Work
from uniform_routing import expected_experts

from meltcore.layers.feed_forward import SparseMoeBlock
from meltcore.models.decoder import Decoder
from meltcore.models.kv_cache_specs import group_layers

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

    step_bytes: weights that every step reads; expert_bytes: of one routed expert; kv_bytes: per token of context;
    state_bytes: per sequence, read and written; token_weights: weights per prompt token, without the head;
    head_weights: of the LM head, for each token that is sampled.
    """

    step_bytes: float
    expert_bytes: float
    experts: int
    top_k: int
    kv_bytes: int
    state_bytes: int
    token_weights: float
    head_weights: int

    @classmethod
    def of(cls, model: Decoder) -> Needs:
        weights = list(model.parameters())
        if not model.config.tie_word_embeddings:
            weights = [weight for weight in weights if weight is not model.embedding.weight.values]
        routed = [block for block in model.modules() if isinstance(block, SparseMoeBlock)]
        chosen = [weight for block in routed for weight in (block.experts.gate_up_proj, block.experts.down_proj)]
        experts, top_k = (routed[0].num_experts, routed[0].top_k) if routed else (0, 0)
        expert_bytes = sum(weight.nbytes / len(weight) for weight in chosen)
        expert_weights = sum(weight.numel() / len(weight) for weight in chosen)
        caches = group_layers(model.kv_cache_specs())
        element_size = model.dtype.itemsize
        return cls(
            step_bytes=sum(weight.nbytes for weight in weights) - experts * expert_bytes,
            expert_bytes=expert_bytes,
            experts=experts,
            top_k=top_k,
            kv_bytes=len(caches.sub_groups) * caches.page_bytes(1, element_size),
            state_bytes=2 * caches.slot_bytes(element_size),
            token_weights=sum(weight.numel() for weight in weights)
            - model.lm_head.weight.values.numel()
            - (experts - top_k) * expert_weights,
            head_weights=model.lm_head.weight.values.numel(),
        )

    def weight_bytes(self, tokens: float) -> float:
        """Bytes of the weights that a step of `tokens` tokens reads."""
        met = expected_experts(self.experts, self.top_k, tokens) if self.experts else 0.0
        return self.step_bytes + met * self.expert_bytes

    def decode_us(self, sequences: int, context: float, limits: Limits) -> float:
        """Microseconds of a decode step of `sequences` sequences."""
        read = self.weight_bytes(sequences) + sequences * (context * self.kv_bytes + self.state_bytes)
        computed = 2 * sequences * (self.token_weights + self.head_weights)
        return max(read / limits.bytes_per_us, computed / limits.flops_per_us)

    def prompts_us(self, sequences: int, tokens: float, limits: Limits) -> float:
        """Microseconds of prefill."""
        computed = 2 * sequences * (tokens * self.token_weights + self.head_weights)
        read = self.weight_bytes(sequences * tokens)
        return max(read / limits.bytes_per_us, computed / limits.flops_per_us)


def floor_s(needs: Needs, work: Work, batch: int, limits: Limits) -> float:
    """Seconds of a work whose requests run in batches of `batch`."""
    prompt = (work.low + work.high) / 2
    rounds, rest = divmod(work.requests, batch)
    total_us = 0.0
    for times, sequences in ((rounds, batch), (1, rest)):
        if times and sequences:
            decode_us = sum(needs.decode_us(sequences, prompt + done, limits) for done in range(1, work.out))
            total_us += times * (needs.prompts_us(sequences, prompt, limits) + decode_us)
    return total_us / 1e6
