"""Defines the messages about transcription between an API server and an engine (msgpack over ZeroMQ)."""

from typing import Literal

import msgspec

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import ShellFromEngine, ShellToEngine

Decoder = Literal["ctc", "rnnt"]


class Transcribe(TaskRequest, tag="transcribe", array_like=True, frozen=True, kw_only=True):
    """Asks for the words of one clip.

    samples: int16 in this machine's byte order, mono, at the engine's sample rate; language: one of the engine's codes.
    """

    samples: bytes
    language: str
    decoder: Decoder = "rnnt"


class Word(msgspec.Struct, array_like=True, frozen=True):
    """Holds one word, its times in seconds from the clip's beginning, and its tokens by their ids in the language.

    logprob: of its tokens together; no_token_logprob: of no token in any of its frames.
    """

    text: str
    start_s: float
    end_s: float
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    no_token_logprob: float = 0.0


class Transcript(TaskResult, tag="transcript", array_like=True, frozen=True, kw_only=True):
    """Holds the text of a clip, its words, and the number of tokens and of encoder frames behind them."""

    text: str = ""
    words: tuple[Word, ...] = ()
    tokens: int = 0
    frames: int = 0


class TranscriptionOutputs(msgspec.Struct, tag="transcripts", array_like=True, frozen=True):
    """Holds the results of one step: all of them, or those for one API server."""

    outputs: list[Transcript]
    stats: BatchStats
    step_ended_s: float

    def with_outputs(self, outputs: list[Transcript]) -> "TranscriptionOutputs":
        """Return the same step with other `outputs`."""
        return TranscriptionOutputs(outputs, self.stats, self.step_ended_s)


class TranscriptionReady(BatchReady, tag="transcription_ready", array_like=True, frozen=True):
    """Reports that a transcription engine can serve.

    max_samples: of one clip; tokens: "synthetic" when a checkpoint has no tokenizer (dummy weights).
    """

    languages: list[str]
    sample_rate: int
    min_samples: int
    max_samples: int
    tokens: Literal["real", "synthetic"]


ToEngine = Transcribe | ShellToEngine
FromEngine = TranscriptionOutputs | TranscriptionReady | ShellFromEngine
