"""Prompts of an exact length that no server has seen: random token ids, decoded and encoded until they stay."""

from __future__ import annotations

import random
from collections.abc import Sequence

from meltcore.errors import ConfigError
from meltcore.load.recount import open_tokenizer

# Above every control id and below the vocabulary of any published model; a server refuses an id it does not have.
LOW_ID, HIGH_ID = 100, 30_000
# A text of Qwen's tokenizer stays after one or two rounds; one that has not by then seldom does later.
_ROUNDS = 10
_DRAWS = 20


class TextMaker:
    """Makes and counts texts with a tokenizer, whose ordinary tokens are `ids`.

    Raises ConfigError where `path` has none.
    """

    def __init__(self, path: str) -> None:
        self._tokenizer = open_tokenizer(path)
        special = self._tokenizer.get_added_tokens_decoder()
        size = self._tokenizer.get_vocab_size(with_added_tokens=False)
        self.ids = [token for token in range(size) if token not in special]

    def count(self, text: str) -> int:
        """Tokens of `text`, special ones left out."""
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def text(self, rng: random.Random, tokens: int) -> str:
        """A random text of exactly `tokens` tokens. Raises ConfigError where the tokenizer yields none."""
        for _ in range(_DRAWS):
            ids = rng.choices(self.ids, k=tokens)
            for _ in range(_ROUNDS):
                text = self._tokenizer.decode(ids)
                ids = self._tokenizer.encode(text, add_special_tokens=False).ids
                if len(ids) == tokens:
                    return text
                ids = ids[:tokens] + rng.choices(self.ids, k=max(0, tokens - len(ids)))
        raise ConfigError(f"no random text of {tokens} tokens stays that long when it is decoded and encoded again")


def random_ids(rng: random.Random, tokens: int, among: Sequence[int] = range(LOW_ID, HIGH_ID)) -> list[int]:
    """Token ids to be sent as they are."""
    return rng.choices(among, k=tokens)
