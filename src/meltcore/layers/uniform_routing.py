"""`--debug uniform-routing`: experts drawn at random, all alike, and the record of how many a layer met.

Dummy weights make tokens so like each other that few experts are read, and a benchmark of them would flatter.
"""

from __future__ import annotations

import torch

_seed: int | None = None
# By layer and by tokens of a step: [tokens, choices] int32, the latest draw. A graph's stay where its replays write.
_drawn: dict[tuple[int, int], torch.Tensor] = {}


def route_at_random(on: bool, seed: int) -> None:
    """In this process, send tokens to experts drawn at random from now on, or no longer.

    Ranks that are given the same seed draw the same.
    """
    global _seed
    _seed = seed if on else None
    _drawn.clear()
    if on:
        torch.manual_seed(seed)


def drawing_seed() -> int | None:
    """None where tokens go where the router sends them."""
    return _seed


def note_drawn(layer: int, experts: torch.Tensor) -> None:
    """Keep what was drawn for a layer, [tokens, choices] int32 below the number of experts, at no cost for a graph.

    Steps launched kernel by kernel on a GPU are left out: those are prompts, which meet all experts. So are graphs of a
    size that is recorded already: those of decode steps are recorded first.
    """
    key = layer, experts.shape[0]
    if not experts.is_cuda or (torch.cuda.is_current_stream_capturing() and key not in _drawn):
        _drawn[key] = experts


@torch.inference_mode()  # as the tensors were made
def forget_drawn() -> None:
    """Before what `experts_met` is to tell of."""
    for experts in _drawn.values():
        experts.fill_(-1)


def experts_met() -> dict[int, float]:
    """By tokens of a step, padding included: how many experts the last such step met, mean over layers.

    Of steps since `forget_drawn`; waits for the device.
    """
    met: dict[int, list[int]] = {}
    for (_, tokens), experts in _drawn.items():
        if int(experts.min()) >= 0:
            met.setdefault(tokens, []).append(len(experts.unique()))
    return {tokens: sum(counts) / len(counts) for tokens, counts in sorted(met.items())}
