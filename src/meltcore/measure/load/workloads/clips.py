"""Generates clips of tones, pauses and noise from a seed, and reads clips of a manifest, to load transcription.

Generated clips are not speech. A transcriber may return no text for them, but takes as long as for speech of the same
length. The clips are generated once per run, before the first level, and each request sends one clip.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

from meltcore.common.errors import ConfigError
from meltcore.measure.load.config import IntRange
from meltcore.measure.load.workloads.wav import WavReader
from meltcore.measure.load.workloads.workload import Clip

SAMPLE_RATE = 16_000
MAX_CLIPS_BYTES = 2**30  # of all clips of a run, which the load generator holds in memory

_PAUSE_RATIO = 0.2  # of segments
_SEGMENT_S = (0.05, 0.3)
_PITCH_HZ = (90.0, 320.0)
_NOISE_LEVEL = 0.01
_PERIOD = 4096  # samples of one period of the tone, with its overtones
_ANGLES = 2 * np.pi * np.arange(_PERIOD) / _PERIOD
_TONE = sum(level * np.sin(order * _ANGLES) for order, level in ((1, 0.5), (2, 0.25), (3, 0.15), (4, 0.1)))
_TONE = np.asarray(_TONE, dtype=np.float32)
# Each segment fades in and out: a click would be the loudest part of a short one.
_FADE = np.linspace(0, 1, SAMPLE_RATE // 200, dtype=np.float32)


def make_clips(seed: int, num_clips: int, seconds: IntRange) -> list[Clip]:
    """Return `num_clips` WAV files, 16-bit mono at 16 kHz.

    The lengths are spread evenly over `seconds` and shuffled by the seed, so that their mean is the middle of the
    range. Raises ConfigError if the files together exceed MAX_CLIPS_BYTES.
    """
    num_bytes = num_clips * (seconds.low + seconds.high) * SAMPLE_RATE  # 2 bytes each, half of the sum of the bounds
    if num_bytes > MAX_CLIPS_BYTES:
        raise ConfigError(f"{num_clips} clips take {num_bytes:,} bytes; the limit is {MAX_CLIPS_BYTES:,}")
    rng = np.random.default_rng(seed)
    lengths_s = seconds.low + (seconds.high - seconds.low) * (rng.permutation(num_clips) + 0.5) / num_clips
    clips = []
    for index, length_s in enumerate(lengths_s):
        num_samples = max(1, round(length_s * SAMPLE_RATE))
        data = encode_wav(_samples(rng, num_samples))
        clips.append(Clip(f"clip-{index}.wav", data, num_samples / SAMPLE_RATE))
    return clips


def encode_wav(samples: np.ndarray, sample_rate: int = SAMPLE_RATE) -> bytes:
    """Encode mono samples, [samples] int16, as a WAV file."""
    data = samples.astype("<i2").tobytes()
    layout = struct.pack("<HHIIHH", 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    chunks = b"WAVEfmt " + struct.pack("<I", len(layout)) + layout + b"data" + struct.pack("<I", len(data)) + data
    return b"RIFF" + struct.pack("<I", len(chunks)) + chunks


def read_manifest(path: Path) -> list[Clip]:
    """Return the clips of a manifest in NeMo's format: one JSON object with `audio_filepath` per line.

    `text` is the transcript, by which answers are graded. `duration` (seconds) is needed for files other than WAV.
    Paths are relative to the manifest. Raises ConfigError, which names the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"manifest {path}: cannot be read ({error})") from error
    clips, num_bytes = [], 0
    for line_number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        clip = _read_clip(line, path.parent, f"manifest {path} line {line_number}")
        num_bytes += len(clip.data)
        if num_bytes > MAX_CLIPS_BYTES:
            raise ConfigError(f"manifest {path}: the files have more than {MAX_CLIPS_BYTES:,} bytes together")
        clips.append(clip)
    if not clips:
        raise ConfigError(f"manifest {path}: it has no clips")
    return clips


def _read_clip(line: str, folder: Path, location: str) -> Clip:
    try:
        fields = json.loads(line)
        name, duration_s, text = fields["audio_filepath"], fields.get("duration"), fields.get("text")
        data = (folder / name).read_bytes()
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{location}: not a JSON object with audio_filepath ({error})") from error
    except OSError as error:
        raise ConfigError(f"{location}: {name} cannot be read ({error.strerror})") from error
    wav = WavReader()
    wav.feed(data)
    seconds = wav.seconds if wav.problem is None and wav.seconds else duration_s
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
        raise ConfigError(f"{location}: {name} is no WAV file with samples, so it needs its duration in seconds")
    return Clip(Path(name).name, data, float(seconds), text if isinstance(text, str) else None)


def _samples(rng: np.random.Generator, num_samples: int) -> np.ndarray:
    """Return samples of tones of changing pitch with pauses and noise: [num_samples] int16."""
    low, high = (int(seconds * SAMPLE_RATE) for seconds in _SEGMENT_S)
    lengths = rng.integers(low, high, num_samples // low + 1)
    phase_steps = (rng.uniform(*_PITCH_HZ, len(lengths)) * _PERIOD / SAMPLE_RATE).astype(np.float32)
    loudness = (rng.uniform(0.2, 0.5, len(lengths)) * (rng.random(len(lengths)) > _PAUSE_RATIO)).astype(np.float32)
    signal = np.empty(lengths.sum(), dtype=np.float32)
    start, ramp = 0, np.arange(high, dtype=np.float32)
    for length, phase_step, level in zip(lengths, phase_steps, loudness, strict=True):
        segment = signal[start : start + length]
        np.take(_TONE, (ramp[:length] * phase_step).astype(np.int32), mode="wrap", out=segment)
        segment *= level
        segment[: len(_FADE)] *= _FADE
        segment[-len(_FADE) :] *= _FADE[::-1]
        start += length
    signal = signal[:num_samples] + _NOISE_LEVEL * rng.standard_normal(num_samples, dtype=np.float32)
    return np.asarray(signal * 32767, dtype=np.int16)
