"""Reads the length of a WAV stream while it arrives, without its samples."""

from __future__ import annotations

import struct

MAX_HEADER_BYTES = 64 * 1024
# Programs that begin to send before they know the length write 0, or a size near the largest of 31 or 32 bits: of
# these 0x7ffff000 (sox), 0x77359400 and 0xffffffdb are met. No answer has as much, six hours of 16 bits at 48 kHz.
UNKNOWN_BYTES = 2_000_000_000  # as in audio/sample_files.py
_MAGIC = (b"RIFF", b"RF64", b"BW64")  # the latter two keep the size in a chunk of its own
_HEAD = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")


class WavReader:
    """Counts the seconds of audio in a WAV file that is fed in parts of any size."""

    __slots__ = ("_header", "_stated_bytes", "bytes_per_s", "num_audio_bytes", "problem")

    def __init__(self) -> None:
        self._header: bytes | None = b""  # None: the samples have begun
        self._stated_bytes: int | None = None
        self.bytes_per_s = 0
        self.num_audio_bytes = 0
        self.problem: str | None = None  # why this is no WAV file

    @property
    def seconds(self) -> float:
        """Return the seconds of audio that have arrived."""
        return self.num_audio_bytes / self.bytes_per_s if self.bytes_per_s else 0.0

    @property
    def missing_bytes(self) -> int:
        """Return how many bytes of samples the header promises and did not come; 0 where it names no size."""
        return 0 if self._stated_bytes is None else max(0, self._stated_bytes - self.num_audio_bytes)

    def feed(self, data: bytes) -> None:
        """Take the next bytes."""
        if self._header is None:
            self._count(len(data))
        elif self.problem is None:
            self._header += data
            self._parse_header(self._header)

    def _count(self, num_bytes: int) -> None:
        """Count bytes of samples; chunks behind the samples do not count."""
        self.num_audio_bytes += num_bytes
        if self._stated_bytes is not None:
            self.num_audio_bytes = min(self.num_audio_bytes, self._stated_bytes)

    def _parse_header(self, data: bytes) -> None:
        if len(data) >= 12 and (data[:4] not in _MAGIC or data[8:12] != b"WAVE"):
            self.problem = f"not a WAV file: it begins with {data[:12]!r}"
            return
        offset = 12
        while len(data) >= offset + _HEAD.size:
            name, size = _HEAD.unpack_from(data, offset)
            offset += _HEAD.size
            if name == b"data":
                self._begin_samples(size, len(data) - offset)
                return
            if name == b"fmt " and size >= _FORMAT.size and len(data) >= offset + _FORMAT.size:
                self.bytes_per_s = _FORMAT.unpack_from(data, offset)[3]
            offset += size + size % 2
        if len(data) > MAX_HEADER_BYTES:
            self.problem = f"no samples within {MAX_HEADER_BYTES:,} bytes"

    def _begin_samples(self, size: int, num_bytes: int) -> None:
        if not self.bytes_per_s:
            self.problem = "the header names no sample rate"
            return
        self._header = None
        self._stated_bytes = size if 0 < size < UNKNOWN_BYTES else None
        self._count(num_bytes)
