"""Problems as packed tensors: conversations concatenated in one row, each a sequence of its own."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from bundled_tokenizer import REPLY_PREFIXES, TURN_START, ReplyPrefix, conversation, has_reasoning
from tokenizers import Tokenizer
from torch.utils.data import IterableDataset, get_worker_info

from meltcore.measure.problems import Problem
from meltcore.measure.problems.pages import MAX_FACTS, page_problem
from meltcore.measure.problems.stories import story_problem
from meltcore.measure.problems.sums import short_problem

# Fractions of a training batch in tokens: pages are ten times longer than the rest, and the hardest to learn.
_PAGE_FRACTION, _STORY_FRACTION = 0.55, 0.2
_FULL_PAGES = 0.7
# Fraction of the answers of a reasoning model that follow reasoning.
_REASONING_FRACTION = 0.1


class PageCurriculum(NamedTuple):
    """How pages of facts grow and count: from `first_facts` to full length over the first `fraction` of training.

    Finding one fact among eight is learned in minutes, one among ninety from scratch is not. A network with sliding
    windows starts with pages that do not fit into a window: otherwise it learns to find facts in those layers. It also
    needs the weight: of all answer tokens, only one in seventy is a number found on a page.

    weight: of an answer token of a page in the loss, where other answer tokens weigh 1.
    """

    first_facts: int = 8
    fraction: float = 0.2
    weight: float = 1.0


# Three trainings of 4.2 to 4.6 minutes without a weight ended at 8 to 47% of long problems.
GEMMA_PAGES = PageCurriculum(first_facts=24, fraction=0.8, weight=8.0)


@dataclass
class Packed:
    """Conversations of lengths n1, n2, ... in one row of T tokens, without padding.

    ids, positions: [T]; starts: [sequences + 1] int32, cumulative; lengths: of the sequences, on the host;
    sources: [answers] positions whose next token is part of an answer; targets: [answers] those tokens;
    owners: [answers] their conversations; weights: [answers] of their losses.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    starts: torch.Tensor
    lengths: list[int]
    sources: torch.Tensor
    targets: torch.Tensor
    owners: torch.Tensor
    weights: torch.Tensor

    def pin_memory(self) -> Packed:
        return Packed(*(value.pin_memory() if isinstance(value, torch.Tensor) else value for value in self._fields()))

    def to(self, device: torch.device) -> Packed:
        moved = (v.to(device, non_blocking=True) if isinstance(v, torch.Tensor) else v for v in self._fields())
        return Packed(*moved)

    def _fields(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))


def pack(
    tokenizer: Tokenizer,
    problems: list[Problem],
    prefixes: list[ReplyPrefix] | None = None,
    *,
    page_weight: float = 1.0,
) -> Packed:
    """Encode and pack whole conversations; the loss covers only the answer and its end token.

    prefixes: of each reply; by default that of a direct answer. page_weight: of answers to long problems in the loss.
    """
    if prefixes is None:
        prefixes = ["answering" if has_reasoning(tokenizer) else "plain"] * len(problems)
    turn_start = tokenizer.token_to_id(TURN_START)
    headers = {prefix: len(tokenizer.encode(text).ids) for prefix, text in REPLY_PREFIXES.items()}
    texts = [conversation(*each) for each in zip(problems, prefixes, strict=True)]
    rows = [encoding.ids for encoding in tokenizer.encode_batch_fast(texts)]
    lengths = np.array([len(row) for row in rows])
    starts = np.concatenate([[0], lengths.cumsum()])
    sources = []
    for row, start, prefix in zip(rows, starts[:-1], prefixes, strict=True):
        reply = len(row) - row[::-1].index(turn_start) - 1 + headers[prefix]
        sources.append(np.arange(start + reply - 1, start + len(row) - 1))
    of_problem = np.array([page_weight if problem.kind == "long" else 1.0 for problem in problems], dtype=np.float32)
    answer_lengths = [len(each) for each in sources]
    ids = np.concatenate(rows)
    where = np.concatenate(sources)
    return Packed(
        ids=torch.from_numpy(ids),
        positions=torch.from_numpy(np.arange(len(ids)) - np.repeat(starts[:-1], lengths)),
        starts=torch.from_numpy(starts.astype(np.int32)),
        lengths=lengths.tolist(),
        sources=torch.from_numpy(where),
        targets=torch.from_numpy(ids[where + 1]),
        owners=torch.from_numpy(np.repeat(np.arange(len(rows)), answer_lengths)),
        weights=torch.from_numpy(np.repeat(of_problem, answer_lengths)),
    )


class TrainingStream(IterableDataset[Packed]):
    """Yield training batches of about `tokens` tokens forever. `progress`: [1] float, shared, the time spent."""

    def __init__(
        self, tokenizer: Tokenizer, *, tokens: int, seed: int, progress: torch.Tensor, pages: PageCurriculum
    ) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._seed = seed
        self._progress = progress
        self._pages = pages

    def __iter__(self) -> Iterator[Packed]:
        worker = get_worker_info()
        rng = random.Random(f"training/{self._seed}/{worker.id if worker else 0}")
        while True:
            problems = _draw(rng, self._tokens, float(self._progress[0]), self._pages)
            prefixes = _beginnings(rng, self._tokenizer, len(problems))
            yield pack(self._tokenizer, problems, prefixes, page_weight=self._pages.weight)


def _beginnings(rng: random.Random, tokenizer: Tokenizer, count: int) -> list[ReplyPrefix] | None:
    if not has_reasoning(tokenizer):
        return None
    return ["thinking" if rng.random() < _REASONING_FRACTION else "answering" for _ in range(count)]


def _draw(rng: random.Random, tokens: int, progress: float, pages: PageCurriculum) -> list[Problem]:
    """About `tokens` tokens of problems; 3 characters per token is this tokenizer's mean on these texts."""
    shares = (_PAGE_FRACTION, _STORY_FRACTION, 1 - _PAGE_FRACTION - _STORY_FRACTION)
    makers = (
        lambda: _page(rng, progress, pages),
        lambda: story_problem(rng, "train"),
        lambda: short_problem(rng, "train"),
    )
    problems: list[Problem] = []
    for share, make in zip(shares, makers, strict=True):
        left = share * tokens
        while left > 0:
            problem = make()
            problems.append(problem)
            left -= len(conversation(problem, "plain")) / 3
    return problems


def _page(rng: random.Random, progress: float, pages: PageCurriculum) -> Problem:
    largest = max(pages.first_facts, int(MAX_FACTS * progress / pages.fraction))
    if largest > MAX_FACTS and rng.random() < _FULL_PAGES:
        return page_problem(rng, "train")
    return page_problem(rng, "train", num_facts=rng.randint(3, min(largest, MAX_FACTS)))
