"""Encodes speech to audio files piece by piece: libsndfile writes most formats, FFmpeg (PyAV) writes AAC."""

from __future__ import annotations

import io
import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

# Arguments of libsndfile. MP3 has a constant bit rate (80 kbit/s at 24 kHz): from it players know the length of a file
# that was sent before its end was known.
_SOUND_FILES: dict[str, dict[str, Any]] = {
    "mp3": {"format": "MP3", "subtype": "MPEG_LAYER_III", "bitrate_mode": "CONSTANT", "compression_level": 0.5},
    "opus": {"format": "OGG", "subtype": "OPUS"},
    "flac": {"format": "FLAC", "subtype": "PCM_16"},
}
_INT16_MAX = 32_767
_HEADER_BYTES = 44
_UNKNOWN_BYTES = 2**32 - 1  # the size in the header of a WAV file that is sent before its end is known

Floats = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Encodes one audio file."""

    def add(self, samples: Floats, *, is_last: bool) -> bytes:
        """Encode more mono samples from -1 to 1, and return the bytes that are ready.

        With `is_last`, all remaining bytes are returned.
        """


def make_encoder(format_name: str, sample_rate: int, *, is_whole: bool) -> Encoder:
    """Return the encoder of a new file at `sample_rate` Hz.

    `format_name` is wav, pcm (int16, little-endian, no header), mp3, opus (in Ogg), flac (always whole) or aac (ADTS).
    With `is_whole` all bytes are returned at the end, so that the header has all sizes.
    """
    if format_name in ("wav", "pcm"):
        return _PCM(sample_rate if format_name == "wav" else None, is_whole)
    if format_name == "aac":
        return _AAC(sample_rate)
    # libsndfile itself, and what is built on it, fails to read FLAC without the number of its samples.
    return _SoundFile(_SOUND_FILES[format_name], sample_rate, is_whole or format_name == "flac")


class _PCM:
    """Encodes int16 samples, after the header of a WAV file unless `rate` is None."""

    def __init__(self, rate: int | None, is_whole: bool) -> None:
        self._rate = rate
        self._is_whole = is_whole
        self._is_first = True
        self._pending: list[bytes] = []

    def add(self, samples: Floats, *, is_last: bool) -> bytes:
        self._pending.append(np.rint(np.clip(samples, -1.0, 1.0) * _INT16_MAX).astype("<i2").tobytes())
        if self._is_whole and not is_last:
            return b""
        data = b"".join(self._pending)
        if self._is_first and self._rate is not None:
            size = len(data) if is_last else _UNKNOWN_BYTES - _HEADER_BYTES + 8
            head = (b"RIFF", size + _HEADER_BYTES - 8, b"WAVE", b"fmt ", 16, 1, 1, self._rate, 2 * self._rate, 2, 16)
            data = struct.pack("<4sI4s4sIHHIIHH4sI", *head, b"data", size if is_last else _UNKNOWN_BYTES) + data
        self._is_first = False
        self._pending.clear()
        return data


class _SoundFile:
    """Encodes with libsndfile, which completes the header at the end. Only a whole file can have this header."""

    def __init__(self, arguments: dict[str, Any], rate: int, is_whole: bool) -> None:
        import soundfile

        self._sink = io.BytesIO()
        self._file: Any = soundfile.SoundFile(self._sink, "w", rate, 1, **arguments)
        self._is_whole = is_whole
        self._num_sent = 0

    def add(self, samples: Floats, *, is_last: bool) -> bytes:
        self._file.write(samples)
        if is_last:
            self._file.close()
        elif self._is_whole:
            return b""
        data = bytes(self._sink.getbuffer()[self._num_sent :])
        self._num_sent += len(data)
        return data


class _AAC:
    """Encodes frames of AAC, each with a header of its own (ADTS)."""

    def __init__(self, rate: int) -> None:
        import av

        self._sink = io.BytesIO()
        self._output: Any = av.open(self._sink, "w", format="adts")
        self._stream: Any = self._output.add_stream("aac", rate=rate, layout="mono")
        self._rate = rate

    def add(self, samples: Floats, *, is_last: bool) -> bytes:
        import av

        if len(samples):
            frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], format="fltp", layout="mono")
            frame.sample_rate = self._rate
            self._output.mux(self._stream.encode(frame))
        if is_last:
            self._output.mux(self._stream.encode(None))
            self._output.close()
        data = self._sink.getvalue()
        self._sink.seek(0)
        self._sink.truncate()
        return data
