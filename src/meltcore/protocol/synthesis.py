"""Defines the messages about speech synthesis between an API server and an engine (msgpack over ZeroMQ)."""

from typing import Literal

import msgspec

from meltcore.protocol.batch import BatchReady, BatchStats, TaskRequest, TaskResult
from meltcore.protocol.shell import ShellFromEngine, ShellToEngine


class Synthesize(TaskRequest, tag="synthesize", array_like=True, frozen=True, kw_only=True):
    """Asks for the speech of one text, which the engine cuts at sentence ends, in the voice of a reference.

    voice: one of the engine's. "": that of `reference`, float32 samples from -1 to 1 in this machine's byte order,
    mono, at the engine's sample rate, in which `reference_text` is spoken. speed: 2 is twice as fast; seed: of the
    noise that speech is made of; num_steps: one of the engine's, 0 for its default.
    """

    text: str
    voice: str = ""
    reference: bytes = b""
    reference_text: str = ""
    speed: float = 1.0
    seed: int = 0
    num_steps: int = 0


class Synthesized(TaskResult, tag="synthesized", array_like=True, frozen=True, kw_only=True):
    """Holds the next samples of a text's speech, of the form of `Synthesize.reference`.

    Results of a request arrive in order, one per chunk of its text. Joined, their samples are the whole speech: chunks
    are cross-faded already. chunk counts from 1 to `chunks`; both are 0 when a request ends early.
    """

    samples: bytes = b""
    chunk: int = 0
    chunks: int = 0


class SynthesisOutputs(msgspec.Struct, tag="speech", array_like=True, frozen=True):
    """Holds the results of one step: all of them, or those for one API server."""

    outputs: list[Synthesized]
    stats: BatchStats
    step_ended_s: float

    def with_outputs(self, outputs: list[Synthesized]) -> "SynthesisOutputs":
        """Return the same step with other `outputs`."""
        return SynthesisOutputs(outputs, self.stats, self.step_ended_s)


class SynthesisReady(BatchReady, tag="synthesis_ready", array_like=True, frozen=True):
    """Reports that a synthesis engine can serve.

    voices: the first is the default; it is empty if every request must bring a reference. max_text: characters;
    min_reference_s, max_reference_s: of a reference without the silence at its ends; steps: accepted by num_steps, the
    first is the default; tokens: "synthetic" when a checkpoint has no vocabulary (dummy weights).
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


ToEngine = Synthesize | ShellToEngine
FromEngine = SynthesisOutputs | SynthesisReady | ShellFromEngine
