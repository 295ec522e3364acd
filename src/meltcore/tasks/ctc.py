"""Greedy CTC decoding of a batch: the best token of every frame, repetitions merged, blanks dropped."""

from __future__ import annotations

from typing import NamedTuple

import torch

from meltcore.models.conformer import padding_mask


class Emissions(NamedTuple):
    """The tokens of one clip, by their ids within the language, with the frames that each spans."""

    tokens: list[int]
    first_frames: list[int]
    end_frames: list[int]  # the frame after the last one


def ctc_greedy(logits: torch.Tensor, frames: torch.Tensor, blank: int) -> list[Emissions]:
    """Return each clip's emissions. logits: [clips, frames, tokens], frames: [clips] int64, frames per clip."""
    best = logits.argmax(-1).masked_fill(padding_mask(frames, logits.shape[1]), blank)
    return [emissions_of(row, blank) for row in best.cpu()]


def emissions_of(best: torch.Tensor, blank: int) -> Emissions:
    """Merge the runs of one clip's best tokens. best: [frames] int64 on the host."""
    tokens, counts = torch.unique_consecutive(best, return_counts=True)
    ends = counts.cumsum(0)
    is_token = tokens != blank
    return Emissions(tokens[is_token].tolist(), (ends - counts)[is_token].tolist(), ends[is_token].tolist())
