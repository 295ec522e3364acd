"""Measures the length of a WAV stream while it arrives, without keeping its samples."""

from __future__ import annotations

import re
import struct

MAX_HEADER_BYTES = 64 * 1024
# Programs that begin to send before they know the length write 0, or a size near the largest of 31 or 32 bits: of
# these 0x7ffff000 (sox), 0x77359400 and 0xffffffdb are met. No answer has as much, six hours of 16 bits at 48 kHz.
UNKNOWN_BYTES = 2_000_000_000  # as in audio/sample_files.py
_MAGIC = (b"RIFF", b"RF64", b"BW64")  # the latter two keep the size in a chunk of its own
_HEAD = struct.Struct("<4sI")
_FORMAT = struct.Struct("<HHIIHH")
_FILE_HEAD = re.compile(rb"(?:RIFF|RF64|BW64)....WAVE", re.DOTALL)  # too long to be met by chance among samples
_FILE_HEAD_BYTES = 12


class WavReader:
    """Counts the seconds of audio in a WAV file that is fed in parts of any size, and in WAV files that follow it.

    Servers that speak sentence by sentence may send one file per sentence.
    """

    __slots__ = ("_bytes_per_s", "_earlier_s", "_header", "_left_bytes", "_num_bytes", "_tail", "problem")

    def __init__(self) -> None:
        self._header: bytes | None = b""  # None: it is complete
        self._bytes_per_s = 0
        self._left_bytes: int | None = 0  # of the samples that the header promises; None: it names no size
        self._num_bytes = 0  # of the samples of this file that have arrived
        self._earlier_s = 0.0  # of audio in the files before
        self._tail = b""  # the last bytes, which may begin the next file
        self.problem: str | None = None  # why this is no WAV file

    @property
    def seconds(self) -> float:
        """Return the seconds of audio that have arrived."""
        return self._earlier_s + (self._num_bytes / self._bytes_per_s if self._bytes_per_s else 0.0)

    @property
    def missing_bytes(self) -> int:
        """Return the number of announced bytes that are missing: samples of the last header that did not arrive.

        Returns 0 if the header gives no size.
        """
        return self._left_bytes or 0

    def feed(self, data: bytes) -> None:
        """Count the audio in the next bytes."""
        while data and self.problem is None:
            if self._header is not None:
                data = self._read_header(self._header + data)
            elif self._left_bytes:
                data = self._read_samples(data, self._left_bytes)
            else:
                data = self._read_to_next(data)

    def _read_header(self, data: bytes) -> bytes:
        """Read the header of a file. Returns the samples after it, or no bytes if the header is not complete."""
        self._header = data
        if len(data) >= _FILE_HEAD_BYTES and (data[:4] not in _MAGIC or data[8:12] != b"WAVE"):
            self.problem = f"not a WAV file: it begins with {data[:12]!r}"
        offset = _FILE_HEAD_BYTES
        while self.problem is None and len(data) >= offset + _HEAD.size:
            name, size = _HEAD.unpack_from(data, offset)
            offset += _HEAD.size
            if name == b"data":
                self._begin_samples(size)
                return data[offset:]
            if name == b"fmt " and size >= _FORMAT.size and len(data) >= offset + _FORMAT.size:
                self._bytes_per_s = _FORMAT.unpack_from(data, offset)[3]
            offset += size + size % 2
        if len(data) > MAX_HEADER_BYTES:
            self.problem = f"no samples within {MAX_HEADER_BYTES:,} bytes"
        return b""

    def _begin_samples(self, size: int) -> None:
        if not self._bytes_per_s:
            self.problem = "the header names no sample rate"
            return
        self._header = None
        self._left_bytes = size if 0 < size < UNKNOWN_BYTES else None

    def _read_samples(self, data: bytes, left_bytes: int) -> bytes:
        """Count samples, of which `left_bytes` are left in the file. Return the bytes after the samples."""
        size = min(len(data), left_bytes)
        self._num_bytes += size
        self._left_bytes = left_bytes - size
        return data[size:]

    def _read_to_next(self, data: bytes) -> bytes:
        """Search for the next file and return its bytes.

        Bytes before the next file are samples of unknown size, or chunks after the samples.
        """
        num_known, data = len(self._tail), self._tail + data
        match = _FILE_HEAD.search(data)
        end = len(data) if match is None else match.start()
        if self._left_bytes is None:
            self._num_bytes += end - num_known  # less than nothing where the next file begins in the tail
        self._tail = b"" if match else data[-_FILE_HEAD_BYTES + 1 :]
        if match is None:
            return b""
        self._earlier_s, self._num_bytes, self._bytes_per_s, self._left_bytes = self.seconds, 0, 0, 0
        self._header = b""
        return data[end:]
