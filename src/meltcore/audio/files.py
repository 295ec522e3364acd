"""Opens audio files that are in memory: with libsndfile, and with FFmpeg (PyAV) what it cannot read.

libsndfile reads WAV, FLAC, Ogg (Vorbis, Opus), MP3, AIFF, CAF and AU. FFmpeg reads the containers of browsers and
phones alone, which are recognized here: it never guesses, so its many other formats cannot be reached.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from meltcore.errors import RequestError

_BLOCK_S = 10.0  # decoded in one call
# A container may announce a little more than its codec gives: encoders delay their signal and fill up frames.
_MISSING_S, _MISSING_FRACTION = 0.5, 0.02
_MAX_PROBE_BYTES = 2**20  # of a file's beginning, in which FFmpeg looks for its streams
_MATROSKA_DURATION, _MAX_HEADER_BYTES = b"\x44\x89", 4096

Floats = npt.NDArray[np.float32]


class AudioFile(Protocol):
    """An open file. num_frames: as its header announces them, None where it does not."""

    sample_rate: int
    num_channels: int
    num_frames: int | None

    def blocks(self) -> Iterator[Floats]:
        """Yield the samples [frames, channels], in blocks of seconds. Raises RequestError for damaged data."""

    def close(self) -> None:
        """Release the decoder."""


def refusal(reason: str) -> RequestError:
    """Return the error of audio that cannot be used."""
    return RequestError(f"the audio {reason}", param="file", code="invalid_audio")


def open_audio(data: bytes) -> AudioFile:
    """Open a file. Raises RequestError (400) for one that is empty, truncated, or in no format that is read here."""
    if not data:
        raise refusal("is empty")
    container = _container(data)
    if container is not None:
        return _FFmpegFile(data, *container)
    _check_complete(data)
    return _SoundFile(data)


def _container(data: bytes) -> tuple[str, str] | None:
    """Return FFmpeg's name of a container that libsndfile cannot read, and its common name; None for other data."""
    if data[4:8] == b"ftyp":
        return "mp4", "MP4 or M4A"
    if data[:4] == b"\x1a\x45\xdf\xa3":
        return "matroska", "WebM or Matroska"
    if len(data) > 1 and data[0] == 0xFF and data[1] & 0xF6 == 0xF0:
        return "aac", "AAC"
    return None


class _SoundFile:
    """A file that libsndfile reads."""

    def __init__(self, data: bytes) -> None:
        import soundfile

        try:
            self._file: Any = soundfile.SoundFile(io.BytesIO(data))
        except (soundfile.SoundFileError, TypeError) as error:
            formats = ", ".join(sorted({*soundfile.available_formats(), *_ffmpeg_formats()} - {"RAW"}))
            raise refusal(f"is not audio in a format that is read here ({formats})") from error
        self.sample_rate, self.num_channels = self._file.samplerate, self._file.channels
        announced = self._file.frames
        self.num_frames = announced if 0 < announced < 2**62 else None

    def blocks(self) -> Iterator[Floats]:
        """Yield the samples. Raises RequestError for damaged data, and FLAC and MP3 that are shorter than announced.

        Of the other formats libsndfile itself announces only what is there.
        """
        import soundfile

        num_read, block_frames = 0, round(_BLOCK_S * self.sample_rate)
        while True:
            try:
                block: Floats = self._file.read(block_frames, dtype="float32", always_2d=True)
            except soundfile.SoundFileError as error:
                raise refusal(f"cannot be decoded after {num_read / self.sample_rate:.1f} s: {error}") from error
            num_read += len(block)
            yield block
            if len(block) < block_frames:
                break
        # Headers of MP3 may count the encoder's padding.
        missing = (self.num_frames or 0) - num_read
        if missing > (0 if self._file.format == "FLAC" else _MISSING_S * self.sample_rate):
            raise refusal(f"is truncated: {self.num_frames} samples are announced, {num_read} are there")

    def close(self) -> None:
        """Release the decoder."""
        self._file.close()


def _ffmpeg_formats() -> tuple[str, ...]:
    """Return the names of the formats that only FFmpeg reads: none where PyAV is not installed."""
    return ("M4A", "MP4", "WEBM", "MATROSKA", "AAC") if find_spec("av") else ()


class _FFmpegFile:
    """A file that FFmpeg reads: its first audio stream."""

    def __init__(self, data: bytes, format_name: str, shown_name: str) -> None:
        try:
            import av
        except ImportError as error:
            raise refusal(f"is {shown_name}, which this server cannot read: it lacks PyAV (meltcore[av])") from error
        options = {"probesize": str(_MAX_PROBE_BYTES)}
        try:
            # PyAV's types do not tell a reader from a writer, nor what a frame's array holds.
            self._container: Any = av.open(
                io.BytesIO(data), format=format_name, container_options=options, metadata_errors="ignore"
            )
        except av.FFmpegError as error:
            raise refusal(f"is {shown_name} that is truncated or damaged: {error.strerror}") from error
        stream = next(iter(self._container.streams.audio), None)
        if stream is None or stream.codec_context is None or not stream.rate:
            self._container.close()
            raise refusal(f"is {shown_name} without audio that can be decoded")
        stream.codec_context.thread_count = 1  # CPU time and memory are limited, and files are decoded concurrently
        self._stream: Any = stream
        self.sample_rate, self.num_channels = int(stream.rate), int(stream.channels)
        self.num_frames: int | None = None
        if seconds := self._announced_s(data, format_name):
            self.num_frames = round(seconds * self.sample_rate)

    def _announced_s(self, data: bytes, format_name: str) -> float:
        """Return the duration in the header, 0 for none. FFmpeg would estimate one from the bit rate, which varies."""
        if format_name == "mp4":
            return float((self._stream.duration or 0) * self._stream.time_base)
        # Matroska has the duration of all streams together, a recording that was not closed has none.
        is_written = format_name == "matroska" and _MATROSKA_DURATION in data[:_MAX_HEADER_BYTES]
        return (self._container.duration or 0) / 1e6 if is_written and len(self._container.streams) == 1 else 0.0

    def blocks(self) -> Iterator[Floats]:
        """Yield the samples. Raises RequestError for damaged data, and for less than announced."""
        import av

        num_read, pending, block_frames = 0, list[Floats](), round(_BLOCK_S * self.sample_rate)
        converter: Any = av.AudioResampler(format="fltp", layout=self._stream.layout, rate=self.sample_rate)
        try:
            for frame in self._container.decode(self._stream):
                # A stream that changes its rate or channels raises ValueError here.
                pending += [converted.to_ndarray().T for converted in converter.resample(frame)]
                if sum(map(len, pending)) >= block_frames:
                    num_read += sum(map(len, pending))
                    yield np.concatenate(pending)
                    pending.clear()
        except (av.FFmpegError, ValueError) as error:
            seconds = (num_read + sum(map(len, pending))) / self.sample_rate
            reason = getattr(error, "strerror", None) or error
            raise refusal(f"cannot be decoded after {seconds:.1f} s: {reason}") from error
        if pending:
            num_read += sum(map(len, pending))
            yield np.concatenate(pending)
        announced = self.num_frames or 0
        if num_read < announced * (1 - _MISSING_FRACTION) - _MISSING_S * self.sample_rate:
            found_s, announced_s = num_read / self.sample_rate, announced / self.sample_rate
            raise refusal(f"is truncated: {announced_s:.1f} s are announced, {found_s:.1f} s are there")

    def close(self) -> None:
        """Release the decoder."""
        self._container.close()


def _check_complete(data: bytes) -> None:
    """Raise RequestError for a WAV file that is shorter than its header says, which libsndfile accepts."""
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return
    position = 12
    while position + 8 <= len(data):
        name, size = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], "little")
        if name == b"data":
            if position + 8 + size > len(data) and size < 2**31 - 1:  # streams that were never closed have the largest
                raise refusal(
                    f"is truncated: {size} bytes of samples are announced, {len(data) - position - 8} are there"
                )
            return
        position += 8 + size + size % 2
