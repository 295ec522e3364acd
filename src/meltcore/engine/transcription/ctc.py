"""Decodes a batch by greedy CTC: takes the best token of every frame, merges repetitions, and drops blanks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from meltcore.models.tasks.conformer import padding_mask


@dataclass(frozen=True)
class Emissions:
    """The tokens of one clip, by their ids within the language, with the frames that each token spans.

    Two Emissions are equal if their tokens and frames are equal. Probabilities do not count, since their last bits
    depend on the other clips of the batch.
    """

    tokens: list[int]
    first_frames: list[int]
    end_frames: list[int]  # the frame after the last one
    logprobs: list[float] = field(default_factory=list, compare=False)  # of each token
    blank_logprobs: list[float] = field(default_factory=list, compare=False)  # of the blank, in each frame of the clip


def ctc_greedy(logits: torch.Tensor, frames: torch.Tensor, blank: int) -> list[Emissions]:
    """Return one `Emissions` per clip.

    Args:
        logits: [clips, frames, tokens].
        frames: [clips] int64, the number of frames of each clip.
        blank: the id of the blank.
    """
    best = logits.argmax(-1).masked_fill(padding_mask(frames, logits.shape[1]), blank)
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    best_logprobs = logprobs.gather(-1, best[..., None])[..., 0].cpu()
    blanks = logprobs[..., blank].cpu()
    rows = zip(best.cpu(), best_logprobs, blanks, frames.tolist(), strict=True)
    return [make_emissions(tokens, scores, row[:count], blank) for tokens, scores, row, count in rows]


def make_emissions(best: torch.Tensor, logprobs: torch.Tensor, blank_logprobs: torch.Tensor, blank: int) -> Emissions:
    """Merge repetitions among the best tokens of one clip. A token has the highest log-probability of its frames.

    Args:
        best: [frames] int64 on the host, the best token of each frame.
        logprobs: [frames], the log-probabilities of these tokens.
        blank_logprobs: [frames], the log-probabilities of the blank.
        blank: the id of the blank.
    """
    tokens, run_of_frame, counts = torch.unique_consecutive(best, return_inverse=True, return_counts=True)
    highest = torch.full((len(tokens),), -torch.inf).scatter_reduce(0, run_of_frame, logprobs, "amax")
    ends = counts.cumsum(0)
    is_token = tokens != blank
    token_ids, first, end, scores = (each[is_token].tolist() for each in (tokens, ends - counts, ends, highest))
    return Emissions(token_ids, first, end, scores, blank_logprobs.tolist())
