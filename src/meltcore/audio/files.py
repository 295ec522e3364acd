"""Opens audio files in memory: with FFmpeg (PyAV) if it is installed, and with libsndfile.

FFmpeg reads a dozen containers, which are recognized by their first bytes. Its many other formats cannot be reached.
libsndfile reads other formats. Without PyAV it also reads those containers whose length it does not have to guess.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Protocol

from meltcore.audio.checks import refusal
from meltcore.audio.containers import AAC, AMR, ASF, AVI, FLV, MATROSKA, MP4, MPEG_TS, WAVPACK, find_container
from meltcore.audio.ffmpeg import Floats, open_with_ffmpeg

_BLOCK_S = 10.0  # decoded in one call
_MISSING_S = 0.5  # headers of MP3 may count the encoder's padding
_FFMPEG_NAMES = ("M4A", "MP4", "3GP", "WEBM", "MATROSKA", "AAC", "AMR", "AVI", "WMA", "FLV", "MPEG-TS", "WAVPACK")
_FFMPEG_FORMATS = (MP4, MATROSKA, AAC, AMR, AVI, ASF, FLV, MPEG_TS, WAVPACK)
# Bytes after the last frame that libsndfile need not have read: tags
_MAX_UNREAD_BYTES = 256
_MISSING_AV_REASON = "this server lacks PyAV (meltcore[av]), which reads it"


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
            formats = ", ".join(sorted({*soundfile.available_formats(), *_ffmpeg_formats()} - {"RAW"}))
            more = "" if find_spec("av") else "; PyAV (meltcore[av]), which this server lacks, reads more"
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


def _ffmpeg_formats() -> tuple[str, ...]:
    """Return the names of the formats that only FFmpeg reads. Returns an empty tuple if PyAV is not installed."""
    return _FFMPEG_NAMES if find_spec("av") else ()
