"""Implements `--debug uniform-routing`: draws experts uniformly at random and records how many a layer used.

With dummy weights all tokens are alike and select few experts, so a benchmark would read too little memory.
"""

from __future__ import annotations

import torch

_seed: int | None = None
# (layer, tokens of a step) -> [tokens, top_k] int32 of the latest such step. A CUDA graph's replays write to it again.
_topk_ids: dict[tuple[int, int], torch.Tensor] = {}


def set_uniform_routing(enabled: bool, seed: int) -> None:
    """Switch uniform routing on or off in this process. Ranks with the same seed draw the same experts."""
    global _seed
    _seed = seed if enabled else None
    _topk_ids.clear()
    if enabled:
        torch.manual_seed(seed)


def uniform_routing_seed() -> int | None:
    """Return the seed of uniform routing, or None if the router selects the experts."""
    return _seed


def record_routing(layer_id: int, topk_ids: torch.Tensor) -> None:
    """Record the experts that a layer used in a step, [tokens, top_k] int32. This adds no work to a CUDA graph.

    Eager steps on a GPU are not recorded: they are prefill and use all experts. A second graph for the same number of
    tokens is not recorded either. So the records are of decode graphs, which are captured first.
    """
    key = layer_id, topk_ids.shape[0]
    if not topk_ids.is_cuda or (torch.cuda.is_current_stream_capturing() and key not in _topk_ids):
        _topk_ids[key] = topk_ids


@torch.inference_mode()  # the tensors were made in it
def clear_routing_record() -> None:
    """Discard the steps recorded so far, so that `mean_experts_used` counts later steps only."""
    for topk_ids in _topk_ids.values():
        topk_ids.fill_(-1)


def mean_experts_used() -> dict[int, float]:
    """Return the mean number of experts that a layer used in the latest step, by the number of tokens of the step.

    Padding counts as tokens. The mean is over the steps since `clear_routing_record`. The call waits for the device.
    """
    expert_counts: dict[int, list[int]] = {}
    for (_, num_tokens), topk_ids in _topk_ids.items():
        if int(topk_ids.min()) >= 0:
            expert_counts.setdefault(num_tokens, []).append(len(topk_ids.unique()))
    return {num_tokens: sum(counts) / len(counts) for num_tokens, counts in sorted(expert_counts.items())}
