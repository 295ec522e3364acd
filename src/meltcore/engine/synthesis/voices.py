"""Reads the voices of a checkpoint folder. A voice is a reference recording with its text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np

from meltcore.common.errors import ConfigError
from meltcore.engine.synthesis.speech_audio import Samples
from meltcore.models.configs.json_file import read_json

_LIST, _FOLDER = "voices.json", "prompts"
# In the script of the published voices: speech is as long as its text is to the reference's, in bytes of UTF-8.
_DUMMY_S = 5.0
_DUMMY_TEXT = "ಇದು ಅಳತೆಗಾಗಿ ಮಾಡಿದ ಧ್ವನಿ, ಇದರ ಮಾತುಗಳಿಗೆ ಅರ್ಥವಿಲ್ಲ ಆದರೆ ಉದ್ದವು ನಿಜವಾದ ಮಾತಿನಷ್ಟು"
_DUMMY_HZ = 120.0


class Voice(NamedTuple):
    """The reference of a voice: mono samples at the model's rate, and the text that is spoken."""

    samples: Samples
    text: str


def read_voices(folder: Path, sample_rate: int) -> dict[str, Voice]:
    """Return the voices by name, the default first.

    voices.json has an object per voice, by name. The object has `audio`, a path within the folder, and `text`. Without
    voices.json, each audio file prompts/NAME.* with a text prompts/NAME.txt is a voice; audio without a text is not.
    Raises ConfigError that names an unreadable file.
    """
    return {name: Voice(_read_audio(path, sample_rate), text) for name, (path, text) in _entries(folder).items()}


def dummy_voice(sample_rate: int, max_s: float, seed: int) -> Voice:
    """Return a reference for random weights: a tone with overtones in syllables, 5 s long, or at most max_s."""
    times = np.arange(int(min(_DUMMY_S, max_s) * sample_rate)) / sample_rate
    chance = np.random.default_rng(seed)
    syllables = np.repeat(chance.uniform(0.3, 1.0, size=40), -(-len(times) // 40))[: len(times)]
    hz = _DUMMY_HZ * chance.uniform(0.8, 1.6)
    tones = sum(np.sin(2 * np.pi * hz * n * times) / n for n in range(1, 12))
    return Voice((0.1 * tones * syllables).astype(np.float32), _DUMMY_TEXT)


def _entries(folder: Path) -> dict[str, tuple[Path, str]]:
    """Return the audio file and the text of each voice, by name."""
    if not (folder / _LIST).exists():
        found = {}
        for words in sorted((folder / _FOLDER).glob("*.txt")):
            audio = [path for path in sorted(words.parent.glob(f"{words.stem}.*")) if path != words]
            if not audio:
                raise ConfigError(f"{words} has the words of a voice, but there is no audio file beside it")
            found[words.stem] = audio[0], _read_text(words)
        return found
    entries: dict[str, tuple[Path, str]] = {}
    for name, entry in read_json(folder / _LIST).items():
        audio_name, text = (entry.get(key) if isinstance(entry, dict) else None for key in ("audio", "text"))
        if not isinstance(audio_name, str) or not isinstance(text, str):
            shown = json.dumps(entry)[:60]
            raise ConfigError(f"{folder / _LIST}: {name} must be an object with audio and text; it is {shown}")
        entries[name] = folder / audio_name, text
    return entries


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def _read_audio(path: Path, sample_rate: int) -> Samples:
    """Return the samples of a file as mono audio at `sample_rate`."""
    try:
        import soundfile
        import soxr
    except ImportError as error:
        raise ConfigError(f"reading {path} needs soundfile and soxr: pip install 'meltcore[audio,engine]'") from error
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (OSError, soundfile.SoundFileError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    resampled: Samples = soxr.resample(samples.mean(axis=1), rate, sample_rate)
    return resampled
