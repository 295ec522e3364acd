"""Defines the messages about translation between an API server and an engine (msgpack over ZeroMQ)."""

from typing import Literal

import msgspec

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import ShellFromEngine, ShellToEngine


class Translate(TaskRequest, tag="translate", array_like=True, frozen=True, kw_only=True):
    """Asks for the translation of one sentence. token_ids: language tags, pieces and end token of the source."""

    token_ids: list[int]


class Translated(TaskResult, tag="translated", array_like=True, frozen=True, kw_only=True):
    """Holds the best translation of a sentence, without start and end token, and its score."""

    token_ids: tuple[int, ...] = ()
    score: float = 0.0


class TranslationOutputs(msgspec.Struct, tag="translations", array_like=True, frozen=True):
    """Holds the results of one step: all of them, or those for one API server."""

    outputs: list[Translated]
    stats: BatchStats
    step_ended_s: float

    def with_outputs(self, outputs: list[Translated]) -> "TranslationOutputs":
        """Return the same step with other `outputs`."""
        return TranslationOutputs(outputs, self.stats, self.step_ended_s)


class TranslationReady(BatchReady, tag="translation_ready", array_like=True, frozen=True):
    """Reports that a translation engine can serve.

    slots: sentences that are decoded together; max_source: tokens of a source; vocab_size: of the encoder; tokens:
    "synthetic" when a checkpoint has no tokenizer (dummy weights).
    """

    slots: int
    max_source: int
    vocab_size: int
    num_beams: int
    max_new_tokens: int
    tokens: Literal["real", "synthetic"]


ToEngine = Translate | ShellToEngine
FromEngine = TranslationOutputs | TranslationReady | ShellFromEngine
