"""Defines the messages about translation between an API server and an engine (msgpack over ZeroMQ)."""

from typing import Literal

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs


class Translate(TaskRequest, tag="translate", array_like=True, frozen=True, kw_only=True):
    """Asks for the translation of one sentence. `token_ids` are the source's language tags, pieces and end token."""

    token_ids: list[int]


class Translated(TaskResult, tag="translated", array_like=True, frozen=True, kw_only=True):
    """Holds the best translation of a sentence, without start and end token, and its score."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the translation."""
        return len(self.token_ids)


class TranslationOutputs(EngineOutputs[Translated, BatchStats], tag="translations", array_like=True, frozen=True):
    """Holds the outputs of one step, one per sentence."""


class TranslationReady(BatchReady, tag="translation_ready", array_like=True, frozen=True):
    """Reports that a translation engine can serve.

    Args:
        slots: number of sentences that are decoded together.
        max_source: the maximum number of tokens of a source sentence.
        vocab_size: size of the encoder's vocabulary.
        tokens: "synthetic" if a checkpoint has no tokenizer (dummy weights).
    """

    slots: int
    max_source: int
    vocab_size: int
    num_beams: int
    max_new_tokens: int
    tokens: Literal["real", "synthetic"]

    LOWEST = ("slots",)

    @property
    def has_synthetic_lengths(self) -> bool:
        """Whether the length of a translation follows from the number of tokens of its source."""
        return self.weights == "dummy"

    def describe_limits(self) -> str:
        """Return a text with the limits of requests."""
        return (
            f"{self.slots} sentences per step of up to {self.max_source} tokens, {self.num_beams} beams of "
            f"{self.max_new_tokens}"
        )

    def probe(self, request_id: str) -> Translate:
        """Return a request to translate a sentence of a few tokens."""
        last = self.vocab_size - 1
        return Translate(request_id=request_id, token_ids=[min(token_id, last) for token_id in (4, 5, 6, 2)])


ToEngine = Translate | CommonToEngine
FromEngine = TranslationOutputs | TranslationReady | CommonFromEngine
