"""Defines the messages of all engines that a server runs. Tags tell them apart, so one decoder reads them all."""

from meltcore.protocol import generation, synthesis, transcription, translation
from meltcore.protocol.batch import BatchStats
from meltcore.protocol.generation import EngineStats, GenerationReady
from meltcore.protocol.synthesis import SynthesisReady
from meltcore.protocol.transcription import TranscriptionReady
from meltcore.protocol.translation import TranslationReady

ToEngine = generation.ToEngine | synthesis.Synthesize | transcription.Transcribe | translation.Translate
FromEngine = generation.FromEngine | synthesis.FromEngine | transcription.FromEngine | translation.FromEngine
ServedReady = GenerationReady | SynthesisReady | TranscriptionReady | TranslationReady


def shared_stats(stats: EngineStats | BatchStats) -> EngineStats:
    """Return statistics as the server's shared memory holds them. Pages and tokens of a batch engine are 0."""
    if isinstance(stats, EngineStats):
        return stats
    return EngineStats(
        running=stats.running, waiting=stats.waiting, steps_total=stats.steps_total, step_s_total=stats.step_s_total
    )
