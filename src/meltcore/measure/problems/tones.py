"""Generates artificial speech for transcribers: words and numbers spelled in pairs of tones, with their text.

All characters have the same length: 2,560 samples at 24 kHz at normal tempo. A word begins with a key, in place of the
space before the word. Each character after the key is a pair of tones: one of six low tones and one of eight high
tones. The key says by how many steps the high tones of its word are moved up. Without the key most words have three
readings. A clip's first word may lack its key, because text has no space there. Such a word has no moved tones. Clips
differ in tempo, loudness, pauses and noise.

Training clips spell random letters and digits; held-out clips spell the words of a list, which no training clip has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from meltcore.measure.problems.sums import Split

CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
# The same characters in the script of the second language
DEVANAGARI = "कखगघङचछजझञटठडढणतथदधनपफबभमय०१२३४५६७८९"
ALPHABETS = {"en": CHARACTERS, "hi": DEVANAGARI}
WORD_START = "\u2581"  # the token of a key
SLOT_S = 2560 / 24_000  # the duration of a key or character at normal tempo
MIN_TEMPO, MAX_TEMPO = 0.8, 1.25  # durations are multiplied by it
NUM_KEYS = 3
READING_NOISE = 0.001  # the standard deviation of the noise in read texts
_HAS_FIRST_KEY = 0.7  # the part of clips

_EDGE_S = 0.008  # in which a tone rises and falls
_LOW_HZ = tuple(500.0 * 1.13**i for i in range(6))
_HIGH_HZ = tuple(1200.0 * 1.15**i for i in range(6 + NUM_KEYS - 1))
_KEY_HZ = ((300.0, 4000.0), (350.0, 4600.0), (400.0, 5200.0))
_WORDS = (
    "apple", "bridge", "candle", "dragon", "engine", "forest", "garden", "harbor", "island", "jacket", "kettle",
    "lemon", "market", "needle", "orange", "pepper", "quiet", "river", "silver", "table", "umbrella", "valley",
    "window", "yellow", "zebra", "a", "at", "go", "we", "sun", "sky", "tree", "moon", "book", "green", "seven", "three",
    "coffee", "summer", "letter", "puzzle", "jazz", "vex", "oxide", "fjord", "whisky", "balloon", "kiwi",
)  # fmt: skip


@dataclass(frozen=True)
class ToneClip:
    """The sounds of a clip. A slot is a key, a character or a pause, and lasts from its start to the next slot's start.

    Args:
        starts_s: [slots + 1] in seconds.
        low_hz: [slots], the low tone of each slot.
        high_hz: [slots], the high tone of each slot.
        amplitudes: [slots], of samples from -1 to 1.
        spoken: [tokens], the slots that are no pause.
        tokens: a character or WORD_START for each spoken slot.
        noise: standard deviation, of samples from -1 to 1.
    """

    starts_s: npt.NDArray[np.float32]
    low_hz: npt.NDArray[np.float32]
    high_hz: npt.NDArray[np.float32]
    amplitudes: npt.NDArray[np.float32]
    spoken: npt.NDArray[np.int64]
    tokens: str
    noise: float

    @property
    def duration_s(self) -> float:
        """The duration in seconds."""
        return float(self.starts_s[-1])

    def text(self, language: str = "en") -> str:
        """Return the words of the clip in the alphabet of a language in ALPHABETS."""
        return in_alphabet(self.tokens, language).replace(WORD_START, " ").strip()


def in_alphabet(text: str, language: str) -> str:
    """Return `text`, which has CHARACTERS only, in the alphabet of a language."""
    return text.translate(str.maketrans(CHARACTERS, ALPHABETS[language]))


def tone_clip(rng: random.Random, split: Split, seconds: float) -> ToneClip:
    """Return a clip of at most `seconds`, and at least one word."""
    tempo = rng.uniform(MIN_TEMPO, MAX_TEMPO)
    lead_s, tail_s = rng.uniform(0.05, 0.4), rng.uniform(0.05, 0.4)
    left_s = seconds - lead_s - tail_s
    words: list[tuple[str, float]] = []  # with the pause before it
    while not words or left_s > 0:
        word = random_word(rng, split)
        pause_s = rng.uniform(0.3, 0.6) if words and rng.random() < 0.12 else 0.0
        left_s -= pause_s + (len(word) + 1) * SLOT_S * tempo
        if left_s > 0 or not words:
            words.append((word, pause_s))
    loudness = 10 ** (rng.uniform(-30, -3) / 20)
    noise = loudness * 10 ** (rng.uniform(-40, -10) / 20)
    return spell(
        words,
        rng,
        tempo=tempo,
        lead_s=lead_s,
        tail_s=tail_s,
        loudness=loudness,
        noise=noise,
        has_first_key=rng.random() < _HAS_FIRST_KEY,
    )


def spell(
    words: list[tuple[str, float]],
    rng: random.Random | None = None,
    *,
    tempo: float = 1.0,
    lead_s: float = 0.0,
    tail_s: float = 0.0,
    loudness: float = 0.5,
    noise: float = 0.0,
    has_first_key: bool = True,
) -> ToneClip:
    """Return the clip of (word, pause before the word in seconds) pairs.

    `rng` varies keys and accents; None varies nothing. With `has_first_key` False the first word has no key.
    """
    slots: list[tuple[float, float, float, float]] = [(lead_s, 0.0, 0.0, 0.0)]  # duration, tones, amplitude
    spoken: list[int] = []
    tokens = ""
    for index, (word, pause_s) in enumerate(words):
        if pause_s > 0:
            slots.append((pause_s, 0.0, 0.0, 0.0))
        has_key = index > 0 or has_first_key
        key = rng.randrange(NUM_KEYS) if rng and has_key else 0
        accent = loudness * (10 ** (rng.uniform(-3, 3) / 20) if rng else 1.0)
        for character in (WORD_START if has_key else "") + word:
            spoken.append(len(slots))
            tokens += character
            low, high = _KEY_HZ[key] if character == WORD_START else _tones(character, key)
            slots.append((SLOT_S * tempo, low, high, accent * (rng.uniform(0.8, 1.0) if rng else 1.0)))
    slots.append((tail_s, 0.0, 0.0, 0.0))
    durations, low_hz, high_hz, amplitudes = np.array(slots, np.float32).T
    return ToneClip(
        starts_s=np.concatenate([[0.0], np.cumsum(durations, dtype=np.float64)]).astype(np.float32),
        low_hz=low_hz,
        high_hz=high_hz,
        amplitudes=amplitudes,
        spoken=np.array(spoken),
        tokens=tokens,
        noise=noise,
    )


def read_aloud(text: str, loudness: float = 0.5, noise: float = READING_NOISE) -> ToneClip:
    """Return the clip that a synthesizer should speak for a text of CHARACTERS, spaces and periods, one slot each."""
    slots = [_TONES_BY_CHARACTER[character] for character in text]
    durations = np.full(len(slots), SLOT_S)
    low_hz, high_hz = np.array(slots, np.float32).T
    return ToneClip(
        starts_s=np.concatenate([[0.0], np.cumsum(durations)]).astype(np.float32),
        low_hz=low_hz,
        high_hz=high_hz,
        amplitudes=np.where(low_hz > 0, loudness, 0.0).astype(np.float32),
        spoken=np.flatnonzero(low_hz > 0),
        tokens=text.replace(".", "").replace(" ", WORD_START),
        noise=noise,
    )


def random_word(rng: random.Random, split: Split) -> str:
    """Return a number or a word.

    A held-out word is on the list of words. A training word has random letters and is not on the list.
    """
    if rng.random() < 0.3:
        return "".join(rng.choices(CHARACTERS[26:], k=rng.randint(1, 6)))
    if split == "heldout":
        return rng.choice(_WORDS)
    while True:
        word = "".join(rng.choices(CHARACTERS[:26], k=rng.randint(1, 8)))
        if rng.random() < 0.3:  # real words have more letters twice in a row
            index = rng.randrange(len(word))
            word = word[: index + 1] + word[index:]
        if word not in _WORDS:
            return word


def render(clip: ToneClip, sample_rate: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Return the samples of a clip, from -1 to 1. `seed` makes the noise."""
    times = np.arange(round(clip.duration_s * sample_rate), dtype=np.float32) / np.float32(sample_rate)
    slots = (np.searchsorted(clip.starts_s, times, side="right") - 1).clip(0, len(clip.low_hz) - 1)
    slot_starts_s, slot_ends_s = clip.starts_s[slots], clip.starts_s[slots + 1]
    samples = tones(times - slot_starts_s, slot_ends_s - times, clip.low_hz[slots], clip.high_hz[slots], np.sin)
    noise = np.random.default_rng(seed).standard_normal(len(times), dtype=np.float32) * np.float32(clip.noise)
    result: npt.NDArray[np.float32] = np.clip(samples * clip.amplitudes[slots] + noise, -1.0, 1.0)
    return result


def tones(since_s: Any, left_s: Any, low_hz: Any, high_hz: Any, sine: Callable[[Any], Any]) -> Any:
    """Return samples of pairs of tones: arrays of numpy, or tensors of torch, all of one shape.

    `since_s` and `left_s` are the seconds since a tone's start and to its end. `sine` is the library's function.
    """
    edges = (since_s / _EDGE_S).clip(0.0, 1.0) * (left_s / _EDGE_S).clip(0.0, 1.0)
    radians_per_hz = 2 * math.pi * since_s
    return edges * 0.5 * (sine(radians_per_hz * low_hz) + sine(radians_per_hz * high_hz))


def _tones(character: str, key: int) -> tuple[float, float]:
    row, column = divmod(CHARACTERS.index(character), 6)
    return _LOW_HZ[row], _HIGH_HZ[column + key]


# What a character of a text is read as: a space is a key, a period a pause.
_TONES_BY_CHARACTER = {" ": _KEY_HZ[0], ".": (0.0, 0.0)} | {character: _tones(character, 0) for character in CHARACTERS}
