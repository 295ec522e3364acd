"""Defines the messages about transcription between an API server and an engine (msgpack over ZeroMQ)."""

from typing import Literal

import msgspec

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs

Decoder = Literal["ctc", "rnnt"]


class Transcribe(TaskRequest, tag="transcribe", array_like=True, frozen=True, kw_only=True):
    """Asks for the words of one clip.

    Args:
        samples: int16 in this machine's byte order, mono, at the engine's sample rate.
        language: one of the engine's codes.
    """

    samples: bytes
    language: str
    decoder: Decoder = "rnnt"


class Word(msgspec.Struct, array_like=True, frozen=True):
    """Holds one word, its times in seconds from the clip's beginning, and its token ids in the language's vocabulary.

    `logprob` is the log-probability of all its tokens together. `no_token_logprob` is the log-probability that none of
    its frames has a token.
    """

    text: str
    start_s: float
    end_s: float
    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    no_token_logprob: float = 0.0


class Transcript(TaskResult, tag="transcript", array_like=True, frozen=True, kw_only=True):
    """Holds the text of a clip, its words, and the numbers of its tokens and encoder frames."""

    text: str = ""
    words: tuple[Word, ...] = ()
    tokens: int = 0
    frames: int = 0


class TranscriptionOutputs(EngineOutputs[Transcript, BatchStats], tag="transcripts", array_like=True, frozen=True):
    """Holds the outputs of one step, one per clip."""


class TranscriptionReady(BatchReady, tag="transcription_ready", array_like=True, frozen=True):
    """Reports that a transcription engine can serve.

    A clip has at most `max_samples`. `tokens` is "synthetic" when a checkpoint has no tokenizer (dummy weights).
    """

    languages: list[str]
    sample_rate: int
    min_samples: int
    max_samples: int
    tokens: Literal["real", "synthetic"]

    @property
    def has_synthetic_lengths(self) -> bool:
        """Whether the length of a transcript follows from the length of its clip."""
        return self.weights == "dummy"

    def describe_limits(self) -> str:
        """Return a text with the limits of requests."""
        clip_s = self.max_samples / self.sample_rate
        return f"transcription in {len(self.languages)} languages, clips of up to {clip_s:.0f} s"

    def probe(self, request_id: str) -> Transcribe:
        """Return a request to transcribe the shortest clip, which is silent."""
        silence = bytes(2 * self.min_samples)
        return Transcribe(request_id=request_id, samples=silence, language=self.languages[0], decoder="ctc")


ToEngine = Transcribe | CommonToEngine
FromEngine = TranscriptionOutputs | TranscriptionReady | CommonFromEngine
