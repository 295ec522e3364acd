"""The bundled translation checkpoint: held-out sentences are right, and what faults of an engine cost.

Faults that these sentences do not show, as the model is sure of every token: positions that are off by one or two, and
beams that keep the prefix of another. Those that `test_indictrans2.py` makes of random checkpoints show them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("sentencepiece", reason="the extra `translate` has it")

from meltcore import Translator
from meltcore.common.errors import RequestError
from meltcore.measure.problems.phrases import SOURCE_LANGUAGE, TARGET_LANGUAGE, Phrase, generate_phrases
from meltcore.models.checkpoints.checkpoint import BUNDLED_TRANSLATION
from meltcore.models.tasks import indictrans2

pytestmark = pytest.mark.usefixtures("one_thread")
SENTENCES = 40
LEAST = 0.95 * SENTENCES
# Of the first 3,000 sentences of this seed, those of whose tokens the model is least sure
UNSURE = (
    13, 77, 103, 106, 317, 320, 412, 521, 570, 627, 670, 703, 861, 870, 968, 1008, 1035, 1054, 1140, 1212, 1330, 1415,
    1472, 1547, 1822, 1840, 2035, 2048, 2127, 2156, 2216, 2393, 2413, 2537, 2571, 2725, 2801, 2841, 2889, 2983,
)  # fmt: skip
# A sentence far longer than any other, to which they are padded. Its own translation is not looked at.
COMPANION = "the old king sees the young queen and " * 12 + "the dog runs."


@cache
def held_out_phrases() -> list[Phrase]:
    return generate_phrases("heldout", num_phrases=UNSURE[-1] + 1, seed=9)


def translator() -> Translator:
    return Translator(BUNDLED_TRANSLATION, device="cpu", memory_bytes=2**27)


def num_right(translator: Translator, num_beams: int, *, unsure: bool = False) -> int:
    phrases = [held_out_phrases()[i] for i in UNSURE] if unsure else held_out_phrases()[:SENTENCES]
    assert any(":" in phrase.source for phrase in phrases), "times are placeholders to the model"
    found = translator.translate(
        [*(phrase.source for phrase in phrases), COMPANION],
        SOURCE_LANGUAGE,
        TARGET_LANGUAGE,
        num_beams=num_beams,
        max_new_tokens=80,
    )
    return sum(text == phrase.target for text, phrase in zip(found[:-1], phrases, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("unsure", [False, True], ids=["first", "unsure"])
def test_held_out_sentences_are_right_by_beams_and_greedily(unsure: bool) -> None:
    model = translator()
    assert num_right(model, 5, unsure=unsure) >= LEAST
    assert num_right(model, 1, unsure=unsure) >= LEAST


def test_directions_are_those_of_the_vocabulary() -> None:
    with pytest.raises(RequestError, match="hin_Deva is not in this model's vocabulary"):
        translator().translate("A dog runs.", SOURCE_LANGUAGE, "hin_Deva")


def _cross_attention(change: Callable[..., tuple[Any, ...]]) -> Callable[[pytest.MonkeyPatch], None]:
    right = indictrans2.beam_cross_attention
    return lambda patch: patch.setattr(indictrans2, "beam_cross_attention", lambda *given: right(*change(*given)))


def _without_encoder_mask(patch: pytest.MonkeyPatch) -> None:
    right = indictrans2.EncoderLayer.forward
    patch.setattr(
        indictrans2.EncoderLayer,
        "forward",
        lambda self, hidden, mask: right(self, hidden, torch.ones_like(mask)),
    )


def _at_one_position(patch: pytest.MonkeyPatch) -> None:
    right = indictrans2.IndicTrans2.decode

    def decode(self: Any, step: indictrans2.DecodeStep, self_kv: torch.Tensor, cross_kv: torch.Tensor) -> torch.Tensor:
        embed = self.decoder_embedding.forward
        patch.setattr(self.decoder_embedding, "forward", lambda ids, positions: embed(ids, positions * 0))
        logits = right(self, step, self_kv, cross_kv)
        patch.setattr(self.decoder_embedding, "forward", embed)
        return logits

    patch.setattr(indictrans2.IndicTrans2, "decode", decode)


def _without_the_last_token(patch: pytest.MonkeyPatch) -> None:
    right = indictrans2.beam_self_attention

    def attend(qkv: Any, cache: Any, writers: Any, slots: Any, positions: torch.Tensor, num_positions: int) -> Any:
        return right(qkv, cache, writers, slots, (positions - 1).clamp(min=0), num_positions)

    patch.setattr(indictrans2, "beam_self_attention", attend)


FAULTS = {
    "padding of sources is read": _cross_attention(
        lambda query, cache, slots, lengths, most: (query, cache, slots, torch.full_like(lengths, most), most)
    ),
    "the source of the next sentence": _cross_attention(
        lambda query, cache, slots, lengths, most: (query, cache, slots.roll(1), lengths, most)
    ),
    "the encoder reads padding": _without_encoder_mask,
    "all targets are at the first position": _at_one_position,
    "new keys and values one position early": _without_the_last_token,
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_fault_of_an_engine_costs_answers(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = translator()
    FAULTS[fault](monkeypatch)
    assert num_right(model, 5, unsure=True) < LEAST
