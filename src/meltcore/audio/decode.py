"""Decodes an audio file to clips of mono PCM, cut at silence. The length of a clip limits the memory, not the file's.

FFmpeg (PyAV), if it is installed, reads a dozen containers, which are recognized by their first bytes. Its many other
formats are not used. libsndfile reads other formats. Without PyAV it also reads containers whose length it does not
have to guess. soxr resamples. Every error names what is wrong.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from meltcore.audio.checks import refusal
from meltcore.audio.containers import (
    AAC,
    AMR,
    ASF,
    AVI,
    FLV,
    MATROSKA,
    MP4,
    MPEG_TS,
    WAVPACK,
    find_container,
    split_joined_files,
)
from meltcore.audio.ffmpeg import Floats, open_with_ffmpeg
from meltcore.common.errors import RequestError

_INT16_MAX = 32_767
# A file whose loudest sample is below this (-72 dB of full scale) holds nothing to hear.
SILENCE_PEAK = 8
# A cut lies in the middle of the quietest window of this length.
_WINDOW_S = 0.2
_WINDOW_FRAMES = 20  # of 10 ms, at whose ends a window begins
_MIN_CLIP_FRACTION = 0.4  # of the longest clip: cuts come after this part of it
# Channels cancel each other in a window where their mean has less than this part of what unlike channels leave in it.
_MIX_WINDOW_S, _CANCELLED = 0.25, 0.25
_LOUD_FRACTION = 0.5  # of the energy of the loudest channel
_MIX_RATE = 8000  # at least, at which they are compared: noise above speech does not count

_BLOCK_S = 10.0  # decoded in one call
_MISSING_S = 0.5  # headers of MP3 may count the encoder's padding
_FFMPEG_NAMES = ("M4A", "MP4", "3GP", "WEBM", "MATROSKA", "AAC", "AMR", "AVI", "WMA", "FLV", "MPEG-TS", "WAVPACK")
_FFMPEG_FORMATS = (MP4, MATROSKA, AAC, AMR, AVI, ASF, FLV, MPEG_TS, WAVPACK)
# Bytes after the last frame that libsndfile need not have read: tags
_MAX_UNREAD_BYTES = 256
_MISSING_AV_REASON = "this server lacks PyAV (meltcore[av]), which reads it"

Samples = npt.NDArray[np.int16]


class AudioLimits(NamedTuple):
    """The rate of the clips in Hz, the length of the longest clip, and the limits of a file."""

    sample_rate: int
    max_clip_s: float
    max_audio_s: float = 4 * 3600.0
    max_channels: int = 8
    min_rate: int = 8000
    max_rate: int = 192_000


class Clip(NamedTuple):
    """A part of the file: its int16 samples, and the index of the first of them at the clips' rate."""

    start: int
    samples: bytes


def decode(data: bytes, limits: AudioLimits) -> Iterator[Clip | float]:
    """Yield the clips of a file that are not silent, and at the end the duration of the file in seconds.

    Raises RequestError (400) if the data is not audio, is truncated or silent, exceeds a limit, or contains NaN.
    """
    cutter = _Cutter(limits)
    num_samples, peak = 0, 0
    for block in _all_samples(data, limits):
        num_samples += block if isinstance(block, int) else len(block)
        if num_samples > limits.max_audio_s * limits.sample_rate:
            raise _length_error(limits)
        if isinstance(block, int):
            yield from cutter.add_silence(block)
            continue
        peak = max(peak, _peak_value(block))
        yield from cutter.add(block)
    if num_samples == 0:
        raise refusal("holds no samples")
    if peak < SILENCE_PEAK:
        raise refusal(f"is silent: its loudest sample is {peak} of {_INT16_MAX}")
    yield from cutter.flush()
    yield num_samples / limits.sample_rate


def _all_samples(data: bytes, limits: AudioLimits) -> Iterator[Samples | int]:
    """Yield the samples of a file and of the files joined to it. A silent gap is yielded as its length in samples."""
    for part in split_joined_files(data):
        with closing(open_audio(part, limits.max_audio_s)) as file:
            _check_format(file, limits)
            yield from _resample_file(file, limits)


def _check_format(file: AudioFile, limits: AudioLimits) -> None:
    """Check the values of the header. Decoding detects a file that is longer or shorter than its header says."""
    if not 1 <= file.num_channels <= limits.max_channels:
        raise refusal(f"has {file.num_channels} channels; the limit is {limits.max_channels}")
    if not limits.min_rate <= file.sample_rate <= limits.max_rate:
        raise refusal(f"has {file.sample_rate} Hz; {limits.min_rate} to {limits.max_rate} are accepted")
    if file.num_frames is not None and file.num_frames > limits.max_audio_s * file.sample_rate:
        raise _length_error(limits)


def _resample_file(file: AudioFile, limits: AudioLimits) -> Iterator[Samples | int]:
    """Yield the file as mono int16 blocks at the clips' rate. A silent gap is yielded as its length at that rate."""
    resampler = _Resampler(file.sample_rate, limits.sample_rate)
    num_read = 0
    for block in file.blocks():
        if isinstance(block, int):
            yield _to_int16(resampler.flush())
            yield resampler.skip(block)
            num_read += block
            continue
        num_read += len(block)
        if not np.isfinite(block).all():
            raise refusal(
                f"holds samples that are not numbers (NaN or infinity) before {num_read / file.sample_rate:.1f} s"
            )
        if block.shape[1] > limits.max_channels:
            raise refusal(f"has {block.shape[1]} channels; the limit is {limits.max_channels}")
        yield _to_int16(resampler.add(mix_channels(block, file.sample_rate)))
    yield _to_int16(resampler.flush())


class _Resampler:
    """Resamples samples, and converts the length of silence without computing samples."""

    def __init__(self, rate: int, new_rate: int) -> None:
        self._rate, self._new_rate = rate, new_rate
        self._num_in = self._num_out = 0
        self._stream: Any = None

    def add(self, mono: Floats) -> Floats:
        """Add samples, and return the resampled samples that are ready."""
        import soxr

        self._num_in += len(mono)
        if self._rate != self._new_rate:
            self._stream = self._stream or soxr.ResampleStream(self._rate, self._new_rate, 1, dtype="float32")
            mono = self._stream.resample_chunk(mono)
        self._num_out += len(mono)
        return mono

    def flush(self) -> Floats:
        """Return the remaining resampled samples. The filter starts anew with samples that are added later."""
        last = np.zeros(0, np.float32)
        if self._stream is not None:
            last = self._stream.resample_chunk(last, last=True)
            self._stream = None
        self._num_out += len(last)
        return last

    def skip(self, num_silent: int) -> int:
        """Add silence; return its length at the new rate."""
        self._num_in += num_silent
        length = round(self._num_in * self._new_rate / self._rate) - self._num_out
        self._num_out += length
        return length


def mix_channels(block: Floats, sample_rate: int) -> Floats:
    """Return the mean of all channels of [frames, channels], or the loudest channel if the channels cancel each other.

    One channel of a recording may have the opposite sign of another channel. Each quarter of a second is judged by
    itself. A hum or an offset in all channels would hide the cancellation, so the differences of successive samples are
    also compared.
    """
    num_channels = block.shape[1]
    mono: Floats = block.mean(axis=1) if num_channels > 1 else block[:, 0]
    if num_channels == 1:
        return mono
    step = max(1, sample_rate // _MIX_RATE)
    means = block[: len(block) // step * step].reshape(-1, step, num_channels).mean(axis=1)
    differences = np.diff(means, axis=0, prepend=means[:1])  # little is left of what is below 100 Hz
    totals, window = _channel_energies(differences), round(_MIX_WINDOW_S * sample_rate / step)
    for start in range(0, len(means), window):
        part = slice(start, start + window)
        if _channels_cancel(means[part]) or _channels_cancel(differences[part]):
            energies = _channel_energies(differences[part])
            # Of channels that are about as loud always the same one: their signs differ.
            loudest = np.where(energies >= _LOUD_FRACTION * energies.max(), totals, -1).argmax()
            at = slice(start * step, (start + window) * step)
            mono[at] = block[at, loudest]
    return mono


def _channels_cancel(channels: Floats) -> bool:
    """Return whether the channels' mean has much less energy than the mean of uncorrelated channels would have."""
    mean = channels.mean(axis=1)
    return bool(mean @ mean < _CANCELLED * _channel_energies(channels).sum() / channels.shape[1] ** 2)


def _channel_energies(channels: Floats) -> Floats:
    energies: Floats = np.einsum("ij,ij->j", channels, channels)
    return energies


def _to_int16(samples: Floats) -> Samples:
    scaled = np.multiply(samples, _INT16_MAX, dtype=np.float32)
    np.clip(scaled, -_INT16_MAX, _INT16_MAX, out=scaled)
    return np.rint(scaled, out=scaled).astype(np.int16)


def _peak_value(samples: Samples) -> int:
    """Return the largest absolute value, or 0 for no samples. It is at most _INT16_MAX."""
    return max(int(samples.max(initial=0)), -int(samples.min(initial=0)))


class _Cutter:
    """Joins blocks into clips, and cuts a clip at its quietest position before it is too long."""

    def __init__(self, limits: AudioLimits) -> None:
        self._max_samples = int(limits.max_clip_s * limits.sample_rate)
        self._window = int(_WINDOW_S * limits.sample_rate)
        self._pending: Samples = np.zeros(0, np.int16)
        self._start = 0

    def add(self, block: Samples) -> Iterator[Clip]:
        """Add samples; yield the clips that are complete."""
        self._pending = np.concatenate([self._pending, block])
        while len(self._pending) > self._max_samples:
            yield from self._take_clip(self._quietest_position())

    def add_silence(self, num_samples: int) -> Iterator[Clip]:
        """Add silence; yield the clips that are complete.

        Silence longer than a clip is counted without making its samples.
        """
        if num_samples <= self._max_samples:
            yield from self.add(np.zeros(num_samples, np.int16))
            return
        edge = np.zeros(self._window // 2, np.int16)  # as a cut in silence leaves it
        yield from self.add(edge)
        yield from self.flush()
        self._start += num_samples - 2 * len(edge)
        yield from self.add(edge)

    def flush(self) -> Iterator[Clip]:
        """Yield the remaining samples as clips."""
        yield from self._take_clip(len(self._pending))

    def _take_clip(self, size: int) -> Iterator[Clip]:
        samples, self._pending = self._pending[:size], self._pending[size:]
        if _peak_value(samples) >= SILENCE_PEAK:
            yield Clip(self._start, samples.tobytes())
        self._start += size

    def _quietest_position(self) -> int:
        """Return the middle of the quietest window between the shortest and the longest length of a clip."""
        first, frame = int(self._max_samples * _MIN_CLIP_FRACTION), self._window // _WINDOW_FRAMES
        num_frames = (self._max_samples - first) // frame
        samples = self._pending[first : first + num_frames * frame].reshape(num_frames, frame).astype(np.float32)
        energies = np.einsum("ij,ij->i", samples, samples).cumsum(dtype=np.float64)
        windows = energies[_WINDOW_FRAMES:] - energies[:-_WINDOW_FRAMES]
        # Of equally quiet windows the last one: fewer and longer clips.
        quietest = len(windows) - 1 - int(windows[::-1].argmin())
        return first + (quietest + 1) * frame + self._window // 2


def _length_error(limits: AudioLimits) -> RequestError:
    return refusal(f"is longer than {limits.max_audio_s:,.0f} s, the limit")


class AudioFile(Protocol):
    """An open file. `num_frames` is the length that its header announces, or None if the header announces none."""

    sample_rate: int
    num_channels: int
    num_frames: int | None

    def blocks(self) -> Iterator[Floats | int]:
        """Yield the samples [frames, channels] in blocks of seconds. A silent gap is yielded as its length in frames.

        Raises RequestError for damaged data.
        """

    def close(self) -> None:
        """Release the decoder."""


def open_audio(data: bytes, max_audio_s: float) -> AudioFile:
    """Open one file, which `containers.split_joined_files` has found to be complete.

    Gaps in the file may have up to `max_audio_s` of silence.

    Raises RequestError (400) for a file that is empty or damaged, or whose format is not supported.
    """
    if not data:
        raise refusal("is empty")
    container = find_container(data)
    if find_spec("av"):
        file = open_with_ffmpeg(data, container, max_audio_s)
        if file is not None:
            return file
    elif container in _FFMPEG_FORMATS:
        raise refusal(f"is {container.shown_name}, which this server cannot read: it lacks PyAV (meltcore[av])")
    return _SoundFile(data)


class _SoundFile:
    """A file that libsndfile reads."""

    def __init__(self, data: bytes) -> None:
        import soundfile

        self._data, self._source = data, io.BytesIO(data)
        try:
            self._file: Any = soundfile.SoundFile(self._source)
        except (soundfile.SoundFileError, TypeError) as error:
            has_ffmpeg = find_spec("av") is not None
            names = {*soundfile.available_formats(), *(_FFMPEG_NAMES if has_ffmpeg else ())} - {"RAW"}
            formats = ", ".join(sorted(names))
            more = "" if has_ffmpeg else "; PyAV (meltcore[av]), which this server lacks, reads more"
            raise refusal(f"is not audio in a format that is read here ({formats}){more}") from error
        self.sample_rate, self.num_channels = self._file.samplerate, self._file.channels
        announced = self._file.frames
        self.num_frames = announced if 0 < announced < 2**62 else None

    def blocks(self) -> Iterator[Floats]:
        """Yield the samples. Raises RequestError for damaged data, and if libsndfile may not read all of it."""
        import soundfile

        num_read, block_frames = 0, round(_BLOCK_S * self.sample_rate)
        while True:
            try:
                block: Floats = self._file.read(block_frames, dtype="float32", always_2d=True)
            except soundfile.SoundFileError as error:
                reason = f"cannot be decoded after {num_read / self.sample_rate:.1f} s: {error}"
                raise refusal(
                    reason if self.num_frames else f"does not say its length; {_MISSING_AV_REASON}"
                ) from error
            num_read += len(block)
            yield block
            if len(block) < block_frames:
                break
        missing = (self.num_frames or 0) - num_read
        if missing > (0 if self._file.format == "FLAC" else _MISSING_S * self.sample_rate):
            problem = f"is truncated: {self.num_frames} samples are announced, {num_read} are there"
            raise refusal(f"{problem}, or has gaps; {_MISSING_AV_REASON}" if self._file.format == "OGG" else problem)
        self._check_end(num_read)

    def _check_end(self, num_read: int) -> None:
        """Raise RequestError if data is left: a guessed length was wrong, or another file follows."""
        unread = len(self._data) - self._source.tell()
        if self._file.format in ("FLAC", "MP3", "OGG") and unread > _MAX_UNREAD_BYTES:
            raise refusal(
                f"has {unread} bytes after {num_read / self.sample_rate:.1f} s, the guessed end; {_MISSING_AV_REASON}"
            )
        if self._file.format in ("WAV", "WAVEX", "AIFF") and num_read == 0 and unread:
            raise refusal(f"does not say its length; {_MISSING_AV_REASON}")

    def close(self) -> None:
        """Release the decoder."""
        self._file.close()
