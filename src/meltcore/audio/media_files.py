"""Counts the elements of AVI, ASF, FLV, MPEG-TS, WavPack and AMR files. Other containers have their own modules."""

from __future__ import annotations

from collections.abc import Iterator

from meltcore.audio.checks import each_element, truncation_error
from meltcore.audio.marks import ASF_HEADER, is_start, later_file_starts
from meltcore.audio.sample_files import UNKNOWN_SIZE

_ASF_DATA = b"\x36\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c"
_ASF_INDEXES = tuple(
    bytes.fromhex(guid)
    for guid in (
        "90080033b1e5cf1189f400a0c90349cb",
        "d329e2d6da35d111903400a0c90349be",
        "f803b1fead12644c840f2a1d2f7ad48c",
        "d03fb73c4a0c0348953dedf7b6228f0c",
    )
)
_ASF_LIVE_BYTES = 50  # of the head of the packets, which is the size that live recordings have of all of them
_FLV_TAGS = (8, 9, 18)  # audio, video and script
_WAVPACK_FIRST = 0x800  # the first block of those with the same samples
_TS_PACKET_BYTES, _M2TS_PACKET_BYTES = 188, 192
# Bytes of a frame by its type, with the byte that holds it; 0 of those that files do not have. Pauses come last.
_AMR_BYTES = (13, 14, 16, 18, 20, 21, 27, 32, 6, 1, 1, 1, 1, 1, 1, 1)
_AMR_WB_BYTES = (18, 24, 33, 37, 41, 47, 51, 59, 61, 6, 0, 0, 0, 0, 1, 1)
_AMR_PAUSE, _AMR_WB_PAUSE = 8, 9  # the first type without speech: noise (SID), lost, or no data
_AMR_ZEROS, _AMR_GOOD = 0x83, 4  # bits that are 0 in the first byte of each frame, and the one of an undamaged frame


def split_avi(data: bytes) -> Iterator[int]:
    """Yield the position at which the next AVI file begins. Raises RequestError for a file with missing packets."""
    position = 0
    for _ in each_element():
        head = data[position : position + 12]
        is_first = head[8:] == b"AVI "  # later parts of long files are AVIX
        if position and (is_first or head[:4] != b"RIFF" or head[8:] != b"AVIX"):
            yield position
        if head[:4] != b"RIFF" or head[8:] not in (b"AVI ", b"AVIX"):
            return
        size = int.from_bytes(head[4:8], "little")
        if not 12 < size < UNKNOWN_SIZE:
            yield from later_file_starts(data, position)
            return
        if position + 8 + size > len(data):
            raise truncation_error(size, len(data) - position - 8)
        position += 8 + size + size % 2


def split_asf(data: bytes) -> Iterator[int]:
    """Yield the position at which the next ASF (WMA) file begins.

    Raises RequestError for a file with missing packets.
    """
    position = 0
    for _ in each_element():
        name, size = data[position : position + 16], int.from_bytes(data[position + 16 : position + 24], "little")
        if position and name not in (_ASF_DATA, *_ASF_INDEXES):
            yield position
        if name not in (ASF_HEADER, _ASF_DATA, *_ASF_INDEXES) or size < 24:
            return
        if name == _ASF_DATA and size <= _ASF_LIVE_BYTES:
            yield from later_file_starts(data, position)
            return
        if position + size > len(data):
            if name not in _ASF_INDEXES:
                raise truncation_error(size, len(data) - position)
            return
        position += size


def split_flv(data: bytes) -> Iterator[int]:
    """Yield the position at which the next FLV file begins. Raises RequestError for a file with missing packets."""
    position = 0
    for _ in each_element():
        if data[position : position + 3] == b"FLV":
            if position:
                yield position
            position += max(9, int.from_bytes(data[position + 5 : position + 9], "big")) + 4
        if position >= len(data):
            return
        if data[position] not in _FLV_TAGS:
            yield position
            return
        size = 11 + int.from_bytes(data[position + 1 : position + 4], "big")
        if position + size > len(data):
            raise truncation_error(size, len(data) - position)
        position += size + 4  # each tag has its size behind it


def split_wavpack(data: bytes) -> Iterator[int]:
    """Yield the position at which the next WavPack file begins. Raises RequestError for a file with missing blocks."""
    position, has_samples = 0, False
    for _ in each_element():
        head = data[position : position + 32]
        size = 8 + int.from_bytes(head[4:8], "little")
        if head[:4] != b"wvpk" or len(head) < 32 or size < 32:
            if position and head:
                yield position
            return
        if position + size > len(data):
            raise truncation_error(size, len(data) - position)
        block_index, num_samples, flags = (int.from_bytes(head[at : at + 4], "little") for at in (16, 20, 24))
        if num_samples and block_index == 0 and flags & _WAVPACK_FIRST:
            if has_samples:
                yield position
            has_samples = True
        position += size


def split_ts(data: bytes) -> Iterator[int]:
    """Yield the position at which an MPEG transport stream ends.

    Joined streams are one stream, whose times start again. Raises RequestError for an incomplete last packet.
    """
    size, first = (_TS_PACKET_BYTES, 0) if data[:1] == b"G" else (_M2TS_PACKET_BYTES, 4)
    marks = data[first::size]
    count = len(marks) - len(marks.lstrip(b"G"))
    if count * size > len(data):
        raise truncation_error(size, len(data) - (count - 1) * size)
    if count * size < len(data):
        yield count * size


def split_amr(data: bytes) -> Iterator[int]:
    """Yield the position at which the next AMR file begins. Raises RequestError for an incomplete last frame."""
    position, sizes = 0, _AMR_BYTES
    for _ in each_element():
        if data[position : position + 5] == b"#!AMR":
            if position:
                yield position
            is_wide = data[position + 5 : position + 9] == b"-WB\n"
            position, sizes = position + (9 if is_wide else 6), _AMR_WB_BYTES if is_wide else _AMR_BYTES
        if position >= len(data):
            return
        size = _amr_bytes(data[position], sizes)
        is_odd = not data[position] & _AMR_GOOD and (
            is_start(data, position) or not any(data[position : position + size])
        )
        if not size or is_odd or data.startswith(b"TAG", position):
            yield position
            return
        if position + size > len(data):
            raise truncation_error(size, len(data) - position)
        position += size


def amr_frames(packet: bytes, is_wide: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield the frames of a packet of AMR, and whether each is a pause. Other bytes are yielded together."""
    sizes, first_pause = (_AMR_WB_BYTES, _AMR_WB_PAUSE) if is_wide else (_AMR_BYTES, _AMR_PAUSE)
    position = 0
    while position < len(packet):
        size = _amr_bytes(packet[position], sizes)
        end = position + (size or len(packet))
        yield packet[position:end], size > 0 and packet[position] >> 3 >= first_pause
        position = end


def _amr_bytes(head: int, sizes: tuple[int, ...]) -> int:
    """Return the length of a frame by its first byte, or 0 for a byte that begins no frame."""
    return 0 if head & _AMR_ZEROS else sizes[head >> 3]
