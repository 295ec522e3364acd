"""Defines the messages about speech synthesis between an API server and an engine (msgpack over ZeroMQ)."""

import math
from array import array
from typing import Literal

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import CommonFromEngine, CommonToEngine, EngineOutputs

_PROBE_TEXT, _TONE_HZ = "नमस्ते", 220.0


class Synthesize(TaskRequest, tag="synthesize", array_like=True, frozen=True, kw_only=True):
    """Asks an engine to speak one text in the voice of a reference. The engine cuts the text at sentence ends.

    Args:
        voice: One of the engine's voices, or "" for the voice of `reference`.
        reference: float32 samples from -1 to 1 in this machine's byte order, mono, at the engine's sample rate.
        reference_text: The text that is spoken in `reference`.
        speed: A factor; 2 is twice as fast.
        seed: The seed of the noise from which speech is generated.
        num_steps: One of the engine's numbers of steps, or 0 for its default.
    """

    text: str
    voice: str = ""
    reference: bytes = b""
    reference_text: str = ""
    speed: float = 1.0
    seed: int = 0
    num_steps: int = 0


class Synthesized(TaskResult, tag="synthesized", array_like=True, frozen=True, kw_only=True):
    """Holds the next samples of a spoken text, in the format of `Synthesize.reference`.

    Results of a request arrive in order, one per chunk of its text. Joined, their samples are the whole speech, because
    chunks are already cross-faded. `chunk` counts from 1 to `chunks`. Both are 0 if a request ends early.
    """

    samples: bytes = b""
    chunk: int = 0
    chunks: int = 0


class SynthesisOutputs(EngineOutputs[Synthesized, BatchStats], tag="speech", array_like=True, frozen=True):
    """Holds the outputs of one step, one per text."""


class SynthesisReady(BatchReady, tag="synthesis_ready", array_like=True, frozen=True):
    """Reports that a synthesis engine can serve.

    Args:
        voices: Names of voices, the default first. If there are no voices, every request must contain a reference.
        max_text: The maximum number of characters of a text.
        min_reference_s: The shortest reference in seconds, without the silence at its ends.
        max_reference_s: The longest reference in seconds, without the silence at its ends.
        steps: The numbers of steps that a request may choose, the default first.
        tokens: "synthetic" if a checkpoint has no vocabulary (dummy weights).
    """

    voices: list[str]
    sample_rate: int
    max_text: int
    min_reference_s: float
    max_reference_s: float
    min_speed: float
    max_speed: float
    steps: list[int]
    tokens: Literal["real", "synthetic"]

    def describe_limits(self) -> str:
        """Return a text with the limits of requests."""
        return (
            f"speech synthesis with {len(self.voices)} voices, texts of up to {self.max_text:,} characters, "
            f"{self.max_cost:,} frames of open requests"
        )

    def probe(self, request_id: str) -> Synthesize:
        """Return a request to speak one word in the first voice. If there are no voices, a tone is the reference."""
        reference_s = (self.min_reference_s + self.max_reference_s) / 2
        return Synthesize(
            request_id=request_id,
            text=_PROBE_TEXT,
            voice=self.voices[0] if self.voices else "",
            reference=b"" if self.voices else _make_tone(self.sample_rate, reference_s),
            reference_text="" if self.voices else _PROBE_TEXT,
            num_steps=min(self.steps),
        )


def _make_tone(sample_rate: int, duration_s: float) -> bytes:
    """Return float32 samples of a tone. It is the reference for a model without voices."""
    step = 2 * math.pi * _TONE_HZ / sample_rate
    return array("f", (0.3 * math.sin(step * index) for index in range(round(sample_rate * duration_s)))).tobytes()


ToEngine = Synthesize | CommonToEngine
FromEngine = SynthesisOutputs | SynthesisReady | CommonFromEngine
