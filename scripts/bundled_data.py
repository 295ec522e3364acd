"""Problems as packed tensors: conversations end to end in one row, each its own sequence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from bundled_tokenizer import BEGINNINGS, TURN_START, Beginning, conversation, thinks
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from meltcore.problems import Problem
from meltcore.problems.pages import MOST_FACTS, page_problem
from meltcore.problems.short import short_problem
from meltcore.problems.stories import story_problem

# Shares of a training batch in tokens: pages are ten times longer than the rest, and the hardest to learn.
_PAGE_SHARE, _STORY_SHARE = 0.55, 0.2
# Pages grow from a few facts to full length over this first part of training: finding one fact among eight is
# learnt in minutes, one among ninety from nothing is not.
_GROWING = 0.2
_FULL_PAGES = 0.7
# Of a model that thinks: how many of its answers come after thoughts.
_THINKING_SHARE = 0.1


@dataclass
class Packed:
    """Conversations of lengths n1, n2, ... in one row of T tokens, padded by nothing.

    ids, positions: [T]; starts: [sequences + 1] int32, cumulative; lengths: of the sequences, on the host;
    sources: [answers] positions whose next token is part of an answer; targets: [answers] those tokens;
    owners: [answers] the conversation each belongs to.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    lengths: list[int]
    sources: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor

    def pin_memory(self) -> Packed:
        return Packed(*(value.pin_memory() if isinstance(value, torch.Tensor) else value for value in self._fields()))

    def to(self, device: torch.device) -> Packed:
        moved = (v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for v in self._fields())
        return Packed(*moved)

    def _fields(
        self,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.ids, self.positions, self.starts, self.lengths, self.sources, self.targets, self.owners


def pack(tokenizer: Tokenizer, problems: list[Problem], beginnings: list[Beginning] | None = None) -> Packed:
    """Encode and pack whole conversations; the loss is on the answer and its end token alone.

    beginnings: of each reply; without them, that of a model's answers at once.
    """
    if beginnings is None:
        beginnings = ["answering" if thinks(tokenizer) else "plain"] * len(problems)
    turn_start = tokenizer.token_to_id(TURN_START)
    headers = {beginning: len(tokenizer.encode(text).ids) for beginning, text in BEGINNINGS.items()}
    texts = [conversation(*each) for each in zip(problems, beginnings, strict=True)]
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    lengths = np.array([len(row) for row in rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    sources = []
    for row, start, beginning in zip(rows, starts[:-1], beginnings, strict=True):
        reply = len(row) - row[::-1].index(turn_start) - 1 + headers[beginning]
        sources.append(np.arange(start + reply - 1, start + len(row) - 1))
    ids = np.concatenate(rows)
    where = np.concatenate(sources)
    return Packed(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(np.arange(len(ids)) - np.repeat(starts[:-1], lengths)),
        starts=torch.from_numpy(starts.astype(np.int32)),
        lengths=lengths.tolist(),
        sources=torch.from_numpy(where),
        targets=torch.from_numpy(ids[where + 1]),
        owners=torch.from_numpy(np.repeat(np.arange(len(rows)), [len(each) for each in sources])),
    )


class TrainingStream(IterableDataset[Packed]):
    """Endless training batches of about `tokens` tokens; `progress`: [1] float, shared, the time spent."""

    def __init__(self, tokenizer: Tokenizer, *, tokens: int, seed: int, progress: torch.Tensor) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._seed = seed
        self._progress = progress

    def __iter__(self) -> Iterator[Packed]:
        worker = get_worker_info()
        rng = random.Random(f"training/{self._seed}/{worker.id if worker else 0}")
        while True:
            problems = _draw(rng, self._tokens, float(self._progress[0]))
            yield pack(self._tokenizer, problems, _beginnings(rng, self._tokenizer, len(problems)))


def _beginnings(rng: random.Random, tokenizer: Tokenizer, count: int) -> list[Beginning] | None:
    if not thinks(tokenizer):
        return None
    return ["thinking" if rng.random() < _THINKING_SHARE else "answering" for _ in range(count)]


def _draw(rng: random.Random, tokens: int, progress: float) -> list[Problem]:
    """About `tokens` tokens of problems, by shares; 3 characters a token is this tokenizer's mean on these texts."""
    shares = (_PAGE_SHARE, _STORY_SHARE, 1 - _PAGE_SHARE - _STORY_SHARE)
    makers = (lambda: _page(rng, progress), lambda: story_problem(rng, "train"), lambda: short_problem(rng, "train"))
    problems: list[Problem] = []
    for share, make in zip(shares, makers, strict=True):
        left = share * tokens
        while left > 0:
            problem = make()
            problems.append(problem)
            left -= len(conversation(problem, "plain")) / 3
    return problems


def _page(rng: random.Random, progress: float) -> Problem:
    largest = max(8, int(MOST_FACTS * progress / _GROWING))
    if largest > MOST_FACTS and rng.random() < _FULL_PAGES:
        return page_problem(rng, "train")
    return page_problem(rng, "train", facts=rng.randint(3, min(largest, MOST_FACTS)))
