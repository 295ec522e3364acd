"""The bundled transcriber: held-out clips are right in one batch, and what faults of an engine cost.

Faults that these clips do not show: masks of attention and of convolutions, as the model has learned to listen close
by; relative positions off by one; and no pre-emphasis, which the features' normalization takes out. Random checkpoints
beside transformers show those.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import numpy as np
import pytest
import torch

pytest.importorskip("sentencepiece", reason="the extra audio has it")
pytest.importorskip("soundfile", reason="the extra audio has it")
pytest.importorskip("soxr", reason="the extra audio has it")

from meltcore import Transcriber
from meltcore.engine.transcription import transducer
from meltcore.engine.transcription.ctc import Emissions
from meltcore.engine.transcription.engine import TranscriptionTask
from meltcore.measure.problems.tones import ALPHABETS, ToneClip, render, tone_clip
from meltcore.models.checkpoints.checkpoint import BUNDLED_TRANSCRIBER
from meltcore.models.configs.task_configs import IndicConformerConfig
from meltcore.models.tasks import conformer, log_mel
from meltcore.protocol.transcription import Decoder, Transcribe
from meltcore.settings.config import EngineConfig

pytestmark = pytest.mark.usefixtures("one_thread")
RATE = 16_000
NUM_CLIPS = 12
LEAST = 0.95 * NUM_CLIPS


@cache
def clips(longest_s: float) -> list[tuple[ToneClip, np.ndarray]]:
    """Held-out clips of 1 s to `longest_s`, with their samples."""
    rng = random.Random("heldout")
    lengths = np.linspace(1.0, longest_s, NUM_CLIPS)
    return [(clip := tone_clip(rng, "heldout", each), render(clip, RATE, i)) for i, each in enumerate(lengths)]


@pytest.mark.slow
def test_held_out_clips_are_right_in_both_languages_by_both_decoders() -> None:
    transcriber = Transcriber(BUNDLED_TRANSCRIBER, device="cpu", memory_bytes=2**30)
    assert transcriber.languages == list(ALPHABETS)
    for language in ALPHABETS:
        for decoder in get_args(Decoder):
            found = transcriber.transcribe([(samples, RATE) for _, samples in clips(15.0)], language, decoder=decoder)
            right = [each.text == clip.text(language) for each, (clip, _) in zip(found, clips(15.0), strict=True)]
            assert sum(right) >= LEAST, (language, decoder)


def num_right(decoder: Decoder) -> int:
    """Clips of 1 to 5 s that are right in one batch, all padded to the longest."""
    task = TranscriptionTask(EngineConfig(model=BUNDLED_TRANSCRIBER, device="cpu", memory_bytes=2**30))
    requests = [
        Transcribe(
            request_id=str(i),
            samples=np.rint(samples * 32767).astype(np.int16).tobytes(),
            language="hi",
            decoder=decoder,
        )
        for i, (_, samples) in enumerate(clips(5.0))
    ]
    task.start(requests, max(map(task.cost, requests)))
    return sum(found.text == clip.text("hi") for found, (clip, _) in zip(task.step(), clips(5.0), strict=True))


def _shift_by_two(patch: pytest.MonkeyPatch) -> None:
    right = conformer.relative_shift
    patch.setattr(conformer, "relative_shift", lambda scores: right(scores.roll(2, -1)))


def _turn_distances(patch: pytest.MonkeyPatch) -> None:
    right = conformer.relative_shift
    patch.setattr(conformer, "relative_shift", lambda scores: right(scores.flip(-1)))


def _normalize_over_padding(patch: pytest.MonkeyPatch) -> None:
    right = log_mel.normalize
    patch.setattr(
        log_mel, "normalize", lambda features, frames: right(features, torch.full_like(frames, features.shape[1]))
    )


def _use_htk_mels(patch: pytest.MonkeyPatch) -> None:
    def filters(config: log_mel.LogMelConfig) -> torch.Tensor:
        top_hz = config.sample_rate / 2
        mels = torch.linspace(0, 2595 * math.log10(1 + top_hz / 700), config.num_mels + 2, dtype=torch.float64)
        bins_hz = torch.linspace(0, top_hz, config.n_fft // 2 + 1, dtype=torch.float64)
        return log_mel.triangles(bins_hz, 700 * (10 ** (mels / 2595) - 1)).float()

    patch.setattr(log_mel, "mel_filters", filters)


def _keep_the_state(patch: pytest.MonkeyPatch) -> None:
    right = transducer._advance
    patch.setattr(
        transducer,
        "_advance",
        lambda model, tokens, state: right(model, tokens, state)._replace(hidden=state.hidden, cell=state.cell),
    )


def _look_at_one_frame(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(transducer, "WINDOW_FRAMES", 1)


def _advance_on_blank(patch: pytest.MonkeyPatch) -> None:
    _look_at_one_frame(patch)
    patch.setattr(transducer._State, "updated", lambda self, new, rows: new)


def _take_the_last_token_as_blank(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(IndicConformerConfig, "blank", property(lambda config: config.tokens_per_language - 1))
    patch.setattr(TranscriptionTask, "_transcript", _transcript(TranscriptionTask._transcript))


def _transcript(right: Callable[..., Any]) -> Callable[..., Any]:
    """Leave out the true blank, which has no text."""

    def transcript(self: TranscriptionTask, request: Transcribe, emissions: Any, count: int) -> Any:
        texts = self._token_texts[request.language]
        columns = emissions.tokens, emissions.first_frames, emissions.end_frames, emissions.logprobs
        kept = [each for each in zip(*columns, strict=True) if each[0] < len(texts)]
        tokens, first, end, logprobs = map(list, zip(*kept, strict=True))
        return right(self, request, Emissions(tokens, first, end, logprobs, emissions.blank_logprobs), count)

    return transcript


FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Decoder]] = {
    "relative positions off by two": (_shift_by_two, "rnnt"),
    "distances turned round": (_turn_distances, "ctc"),
    "padding counts in the features' mean": (_normalize_over_padding, "ctc"),
    "mels of HTK": (_use_htk_mels, "ctc"),
    "state not advanced": (_keep_the_state, "rnnt"),
    "state advanced on blank": (_advance_on_blank, "rnnt"),
    "blank off by one": (_take_the_last_token_as_blank, "ctc"),
}


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["ctc", "rnnt"])
def test_clips_of_many_lengths_are_right_in_one_batch(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_right(decoder) >= LEAST
    if decoder == "rnnt":  # what advancing on blanks is tried with
        _look_at_one_frame(monkeypatch)
        assert num_right(decoder) >= LEAST


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_an_engine_costs_transcripts(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, decoder = FAULTS[fault]
    make(monkeypatch)
    assert num_right(decoder) < LEAST
