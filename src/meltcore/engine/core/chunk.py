"""Represents the tokens of one sequence in one step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meltcore.engine.core.request import Request

# Stands for a draft that is proposed by a step in flight.
UNKNOWN_DRAFT = -1


class Chunk(NamedTuple):
    """The tokens [start, start + size) of one sequence in one step.

    A chunk that ends at its sequence's last token samples. Before the step, the snapshot in slot `restore` is copied
    into the sequence's recurrent-state slot. After the step, the state is copied to the slot `snapshot`. For a slot of
    0 nothing is copied. A decoding sequence computes its newest token and after it `drafts`, which are guesses: it
    samples after each of them.

    Drafts of UNKNOWN_DRAFT follow a step in flight. `start` is 0 until this step is read, and then `drafts` are known.
    """

    request: Request
    start: int
    size: int
    samples: bool
    restore: int = 0
    snapshot: int = 0
    drafts: tuple[int, ...] = ()

    @property
    def is_following(self) -> bool:
        """Whether only the device knows the drafts yet, and where the chunk starts."""
        return self.drafts[:1] == (UNKNOWN_DRAFT,)

    @property
    def prompt_tokens(self) -> int:
        """The number of prompt tokens. A chunk of one token is a decode, and so is one with drafts."""
        return self.size if self.size > 1 and not self.drafts else 0

    @property
    def end(self) -> int:
        """The position after the last token of the chunk."""
        return self.start + self.size


def prompt_tokens(chunks: Iterable[Chunk]) -> int:
    """Return the number of prompt tokens in a step."""
    return sum(chunk.prompt_tokens for chunk in chunks)
