"""Clips of tones: every character is its pair of tones, moved up by the key, and words of the list are held out."""

import random

import numpy as np
import pytest

from meltcore.measure.problems import tones
from meltcore.measure.problems.tones import CHARACTERS, DEVANAGARI, WORD_START, read_aloud, render, spell, tone_clip

RATE = 16_000


def loudest_hz(samples: np.ndarray) -> list[float]:
    """The two strongest frequencies."""
    size = 4 * RATE
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples)), size))
    found = []
    for _ in range(2):
        peak = int(spectrum.argmax())
        found.append(peak * RATE / size)
        spectrum[max(0, peak - 120) : peak + 120] = 0
    return sorted(found)


def test_every_slot_sounds_as_its_character_moved_up_by_the_key() -> None:
    clip = spell([("a7zq", 0.0), ("m0", 0.4)], random.Random(5), lead_s=0.2, tail_s=0.1)
    assert clip.tokens == f"{WORD_START}a7zq{WORD_START}m0"
    assert clip.text() == "a7zq m0"
    samples, key = render(clip, RATE), 0
    for slot, token in zip(clip.spoken, clip.tokens, strict=True):
        begin, end = (round(float(at) * RATE) for at in clip.starts_s[slot : slot + 2])
        heard = loudest_hz(samples[begin:end])
        if token == WORD_START:
            expected = min(tones._KEY_HZ, key=lambda pair: abs(pair[0] - heard[0]))
            key = tones._KEY_HZ.index(expected)
        else:
            row, column = divmod(CHARACTERS.index(token), 6)
            expected = (tones._LOW_HZ[row], tones._HIGH_HZ[column + key])
        assert heard == pytest.approx(expected, abs=12)
    assert np.abs(samples[: round(0.2 * RATE)]).max() < 1e-6


def test_held_out_words_are_in_no_training_clip() -> None:
    rng = random.Random(1)
    trained = {word for _ in range(150) for word in tone_clip(rng, "train", 10).text().split()}
    asked = {word for _ in range(50) for word in tone_clip(rng, "heldout", 10).text().split()}
    listed = set(tones._WORDS)
    assert not trained & listed
    assert {word for word in asked if not word.isdecimal()} <= listed
    assert len(asked & listed) > len(listed) // 2


def test_clips_fill_the_time_asked_for_and_repeat_by_seed() -> None:
    for seconds in (1.0, 5.0, 15.0):
        clip, again = (tone_clip(random.Random(7), "heldout", seconds) for _ in range(2))
        assert clip.text() == again.text()
        assert clip.duration_s <= max(seconds, 2.0)
        assert clip.duration_s > 0.7 * seconds
        assert np.array_equal(render(clip, RATE, seed=1), render(again, RATE, seed=1))


def test_a_read_text_has_a_slot_per_character() -> None:
    clip = read_aloud("ab 4. c")
    assert clip.duration_s == pytest.approx(7 * tones.SLOT_S)
    assert clip.text() == "ab 4 c"
    assert clip.amplitudes[4] == 0


def test_alphabets_have_as_many_different_letters() -> None:
    assert len(set(DEVANAGARI)) == len(DEVANAGARI) == len(CHARACTERS)
    assert spell([("a9", 0.0)]).text("hi") == DEVANAGARI[0] + DEVANAGARI[35]
