"""Decodes an audio file to clips of mono PCM that are cut at silence. Memory is bounded by the clip, not by the file.

libsndfile reads WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF, CAF and AU; soxr resamples. Every error names what is wrong.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meltcore.errors import RequestError

_BLOCK_S = 10.0  # decoded in one call
_INT16_MAX = 32_767
# A file whose loudest sample is below this (-72 dB of full scale) holds nothing to hear.
SILENCE_PEAK = 8
# A cut lies in the middle of the quietest window of this length.
_WINDOW_S = 0.2
_MIN_CLIP_FRACTION = 0.4  # of the longest clip: cuts come after this part of it

Samples = npt.NDArray[np.int16]
Floats = npt.NDArray[np.float32]


class AudioLimits(NamedTuple):
    """The rate of the clips in Hz, the length of the longest clip, and the limits of a file."""

    sample_rate: int
    max_clip_s: float
    max_audio_s: float = 4 * 3600.0
    max_channels: int = 2
    min_rate: int = 8000
    max_rate: int = 96_000


class Clip(NamedTuple):
    """A part of the file: its first sample at the clips' rate, and int16 samples."""

    start: int
    samples: bytes


def decode(data: bytes, limits: AudioLimits) -> Iterator[Clip | float]:
    """Yield the clips of a file that are not silent, and last its duration in seconds.

    Raises RequestError (400) for data that is no audio, truncated, silent, beyond a limit, or holds NaN.
    """
    import soundfile

    if not data:
        raise _refusal("is empty")
    _check_complete(data)
    try:
        file = soundfile.SoundFile(io.BytesIO(data))
    except (soundfile.SoundFileError, TypeError) as error:
        formats = ", ".join(sorted(soundfile.available_formats()))
        raise _refusal(f"is not audio in a format that is read here ({formats})") from error
    with file:
        _check_format(file, limits)
        cutter = _Cutter(limits)
        num_samples, peak = 0, 0
        for block in _resampled(file, limits):
            num_samples += len(block)
            if num_samples > limits.max_audio_s * limits.sample_rate:
                raise _too_long(limits)
            peak = max(peak, int(np.abs(block.astype(np.int32)).max(initial=0)))
            yield from cutter.add(block)
        if num_samples == 0:
            raise _refusal("holds no samples")
        if peak < SILENCE_PEAK:
            raise _refusal(f"is silent: its loudest sample is {peak} of {_INT16_MAX}")
        yield from cutter.rest()
        yield num_samples / limits.sample_rate


def _check_format(file: Any, limits: AudioLimits) -> None:
    """Check what the header says. A longer or shorter file than it says is found while decoding."""
    if file.channels > limits.max_channels:
        raise _refusal(f"has {file.channels} channels; the limit is {limits.max_channels}")
    if not limits.min_rate <= file.samplerate <= limits.max_rate:
        raise _refusal(f"has {file.samplerate} Hz; {limits.min_rate} to {limits.max_rate} are accepted")
    if 0 < limits.max_audio_s * file.samplerate < file.frames < 2**62:
        raise _too_long(limits)


def _check_complete(data: bytes) -> None:
    """Raise RequestError for a WAV file that is shorter than its header says, which libsndfile accepts."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    position = 12
    while position + 8 <= len(data):
        name, size = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], "little")
        if name == b"data":
            if position + 8 + size > len(data) and size < 2**31 - 1:  # streams that were never closed have the largest
                raise _refusal(
                    f"is truncated: {size} bytes of samples are announced, {len(data) - position - 8} are there"
                )
            return
        position += 8 + size + size % 2


def _resampled(file: Any, limits: AudioLimits) -> Iterator[Samples]:
    """Yield the file as mono int16 blocks at the clips' rate."""
    import soundfile
    import soxr

    resampler = None
    if file.samplerate != limits.sample_rate:
        resampler = soxr.ResampleStream(file.samplerate, limits.sample_rate, 1, dtype="float32")
    num_read, block_frames = 0, round(_BLOCK_S * file.samplerate)
    while True:
        try:
            block: Floats = file.read(block_frames, dtype="float32", always_2d=True)
        except soundfile.SoundFileError as error:
            raise _refusal(f"cannot be decoded after {num_read / file.samplerate:.1f} s: {error}") from error
        num_read += len(block)
        if not np.isfinite(block).all():
            raise _refusal(
                f"holds samples that are not numbers (NaN or infinity) before {num_read / file.samplerate:.1f} s"
            )
        is_last = len(block) < block_frames
        mono: Floats = block.mean(axis=1)
        if resampler is not None:
            mono = resampler.resample_chunk(mono, last=is_last)
        yield np.rint(np.clip(mono, -1.0, 1.0) * _INT16_MAX).astype(np.int16)
        if is_last:
            break
    if file.format == "FLAC" and num_read < file.frames < 2**62:
        raise _refusal(f"is truncated: {file.frames} samples are announced, {num_read} are there")


class _Cutter:
    """Joins blocks, and cuts clips at the quietest place before they are too long."""

    def __init__(self, limits: AudioLimits) -> None:
        self._max_samples = int(limits.max_clip_s * limits.sample_rate)
        self._window = int(_WINDOW_S * limits.sample_rate)
        self._pending: Samples = np.zeros(0, np.int16)
        self._start = 0

    def add(self, block: Samples) -> Iterator[Clip]:
        """Add samples; yield the clips that are complete."""
        self._pending = np.concatenate([self._pending, block])
        while len(self._pending) > self._max_samples:
            yield from self._clip(self._quietest())

    def rest(self) -> Iterator[Clip]:
        """Yield what is left."""
        yield from self._clip(len(self._pending))

    def _clip(self, size: int) -> Iterator[Clip]:
        samples, self._pending = self._pending[:size], self._pending[size:]
        if np.abs(samples.astype(np.int32)).max(initial=0) >= SILENCE_PEAK:
            yield Clip(self._start, samples.tobytes())
        self._start += size

    def _quietest(self) -> int:
        """Return the middle of the quietest window between the shortest and the longest length of a clip."""
        first = int(self._max_samples * _MIN_CLIP_FRACTION)
        energies = np.square(self._pending[first : self._max_samples].astype(np.float64)).cumsum()
        windows = energies[self._window :] - energies[: -self._window]
        # Of equally quiet windows the last one: fewer and longer clips.
        quietest = len(windows) - 1 - int(windows[::-1].argmin())
        return first + quietest + self._window // 2


def _too_long(limits: AudioLimits) -> RequestError:
    return _refusal(f"is longer than {limits.max_audio_s:,.0f} s, the limit")


def _refusal(reason: str) -> RequestError:
    return RequestError(f"the audio {reason}", param="file", code="invalid_audio")
