"""The bundled synthesizer: the bundled transcriber reads back what it says, and what faults of an engine cost.

A fault that these texts do not show is another mel scale of the reference's spectrogram, as all that is to say is in
the text. Spectrograms beside transformers' show it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import get_args

import numpy as np
import pytest
import torch

pytest.importorskip("sentencepiece", reason="the extra audio has it")
pytest.importorskip("soundfile", reason="the extra audio has it")
pytest.importorskip("soxr", reason="the extra audio has it")

from meltcore import Synthesizer, Transcriber
from meltcore.measure.problems.tones import random_word
from meltcore.models.checkpoints.checkpoint import BUNDLED_TRANSCRIBER, BUNDLED_VOICE
from meltcore.models.tasks import indicf5
from meltcore.protocol.transcription import Decoder

pytestmark = pytest.mark.usefixtures("one_thread")
FEWEST_STEPS = 8
# In one batch, of which all but one are padded
TEXTS = ("sun 42", "fjord jazz", "a kettle 917")


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(BUNDLED_TRANSCRIBER, device="cpu", memory_bytes=2**30)


def speak(texts: list[str], num_steps: int) -> list[tuple[np.ndarray, int]]:
    """These texts, spoken by the default voice: samples and their rate."""
    synthesizer = Synthesizer(BUNDLED_VOICE, device="cpu", memory_bytes=2**30)
    return [(samples, synthesizer.sample_rate) for samples in synthesizer.synthesize(texts, num_steps=num_steps)]


@pytest.mark.slow
def test_spoken_texts_are_read_back(transcriber: Transcriber) -> None:
    clips = speak(list(TEXTS), FEWEST_STEPS)
    for decoder in get_args(Decoder):
        heard = [found.text for found in transcriber.transcribe(clips, "en", decoder=decoder)]
        assert heard == list(TEXTS), decoder


@pytest.mark.slow
def test_held_out_texts_of_all_lengths_are_read_back(transcriber: Transcriber) -> None:
    rng = random.Random("heldout")
    texts = [" ".join(random_word(rng, "heldout") for _ in range(words))[:52].strip() for words in (1, 3, 5, 8)]
    clips = speak(texts, 16)
    for decoder in get_args(Decoder):
        heard = [found.text for found in transcriber.transcribe(clips, "en", decoder=decoder)]
        assert heard == texts, decoder


def _rotate_all_heads(patch: pytest.MonkeyPatch) -> None:
    rotate = indicf5.rotate_pairs
    patch.setattr(indicf5, "_ROTARY_HEAD", slice(None))
    patch.setattr(indicf5, "rotate_pairs", lambda heads, rotary: [rotate(each, rotary) for each in heads.unbind(3)])


def _turn_the_guidance(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(indicf5, "GUIDANCE", -indicf5.GUIDANCE)


def _mask_the_filler(patch: pytest.MonkeyPatch) -> None:
    right = indicf5.TextEmbedding.forward

    def forward(self: indicf5.TextEmbedding, token_ids: torch.Tensor, is_padding: torch.Tensor | None) -> torch.Tensor:
        return right(self, token_ids, is_padding).masked_fill((token_ids == indicf5.FILLER)[:, :, None], 0.0)

    patch.setattr(indicf5.TextEmbedding, "forward", forward)


def _turn_the_steps(patch: pytest.MonkeyPatch) -> None:
    right = indicf5.IndicF5._modulations
    patch.setattr(indicf5.IndicF5, "_modulations", lambda self, times: right(self, times.flip(0)))


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rotary positions on all heads": _rotate_all_heads,
    "sign of guidance": _turn_the_guidance,
    "filler is masked": _mask_the_filler,
    "order of steps": _turn_the_steps,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_an_engine_costs_texts(fault: str, transcriber: Transcriber, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[fault](monkeypatch)
    clips = speak(list(TEXTS), FEWEST_STEPS)
    heard = [found.text for found in transcriber.transcribe(clips, "en", decoder="ctc")]
    assert sum(map(str.__eq__, heard, TEXTS)) < len(TEXTS)
