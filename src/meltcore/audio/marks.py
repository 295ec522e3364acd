"""Finds audio files by the magic bytes with which they begin, at a position or among other bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from meltcore.audio.checks import each_element
from meltcore.audio.mpeg import AAC_SYNC, MP3_SYNC, NO_FLAC_SYNC, frame_runs

ASF_HEADER = b"\x30\x26\xb2\x75\x8e\x66\xcf\x11\xa6\xd9\x00\xaa\x00\x62\xce\x6c"
_TS_PACKET = rb"G[\x00-\x5f].[\x10-\x3f]"  # the head of a packet without an error, not scrambled
TS_MARK = rb".{184}".join([_TS_PACKET] * 4)
M2TS_MARK = rb"...." + rb".{188}".join([_TS_PACKET] * 4)
_ID3 = re.compile(rb"ID3[\x02-\x04]\x00.[\x00-\x7f]{4}", re.DOTALL)
# The head of a tag (APE), which stands at its end too
_APE = re.compile(rb"APETAGEX(?:\xd0\x07|\xe8\x03)\x00\x00(.{4}).{7}(.)\x00{8}", re.DOTALL)
_IS_APE_HEAD = 0x20  # not the one at the end
_FLAC = re.compile(rb"fLaC[\x00\x80]\x00\x00\x22")
# These are too long to be met by chance. One by one they are found at 3 GB/s, as alternatives of one pattern at 0.02.
_STARTS = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (
        *(rb"OggS\x00\x02", _FLAC.pattern, rb"RIF[FX]....WAVE", rb"RF64....WAVE", rb"BW64....WAVE"),
        *(rb"RIFF....AVI LIST", rb"FORM....AIF[FC]", rb"caff\x00\x01\x00\x00desc", rb"riff\x2e\x91\xcf\x11\xa5\xd6"),
        *(rb"\.snd\x00\x00[\x00-\x0f].....\x00\x00\x00[\x01-\x1c]", rb"wvpk..[\x00-\x0f]\x00[\x02-\x10]\x04"),
        *(rb"\x1a\x45\xdf\xa3(?:[\x80-\xff]|\x01\x00{6}.)\x42\x86", rb"FLV\x01[\x01\x04\x05]\x00\x00\x00\x09"),
        *(rb"\x00\x00\x00.ftyp", rb"#!AMR(?:-WB)?\n", re.escape(ASF_HEADER), TS_MARK),
    )
)


def is_start(data: bytes, position: int) -> bool:
    """Return whether the bytes at `position` are the magic bytes with which an audio file begins."""
    return any(pattern.match(data, position) for pattern in _STARTS)


def file_starts(data: bytes, position: int, end: int | None = None) -> list[int]:
    """Return the ascending positions of magic bytes between `position` and `end`. None means the end of the data."""
    end = len(data) if end is None else end
    return sorted(match.start() for pattern in _STARTS for match in pattern.finditer(data, position, end))


def later_file_starts(data: bytes, position: int) -> Iterator[int]:
    """Yield the positions at which other files begin after the file at `position`, whose header gives no size."""
    return _skip_tags(data, position, file_starts(data, position + 1))


def starts_after_mp3(data: bytes) -> Iterator[int]:
    """Yield the positions at which other files begin after MP3 frames.

    Tags between the MP3 frames are left to FFmpeg.
    """
    return _skip_tags(data, 0, file_starts(data, 1), frame_runs(data, 1, AAC_SYNC))


def starts_after_aac(data: bytes) -> Iterator[int]:
    """Yield the positions at which other files begin after AAC frames."""
    return _skip_tags(data, 0, file_starts(data, 1), frame_runs(data, 1, MP3_SYNC))


def starts_after_flac(data: bytes) -> Iterator[int]:
    """Yield the positions at which files of any format begin after FLAC frames, whose lengths are not known."""
    return _skip_tags(data, 0, file_starts(data, 1), _id3_tags(data, 1), frame_runs(data, 1, NO_FLAC_SYNC))


def starts_after_others(data: bytes, position: int) -> Iterator[int]:
    """Yield the positions at which files of any format begin after bytes at `position` that belong to no file."""
    later = position + 1
    return _skip_tags(data, position, file_starts(data, later), _id3_tags(data, later), frame_runs(data, later))


def id3_end(data: bytes, start: int) -> int:
    """Return the position at which the ID3v2 tag at `start` ends, by the size in its header."""
    length = sum((byte & 127) << 7 * place for place, byte in enumerate(data[start + 9 : start + 5 : -1]))
    return start + 10 + length + (10 if data[start + 5] & 0x10 else 0)


def ape_tags(data: bytes, position: int = 0) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each APE tag. The size is in the tag's header and again at its end.

    Old APE tags have no header.
    """
    for match in _APE.finditer(data, position):
        size, is_head = int.from_bytes(match.group(1), "little"), match.group(2)[0] & _IS_APE_HEAD
        yield (match.start(), match.end() + size) if is_head else (match.end() - size, match.end())


def _id3_tags(data: bytes, position: int) -> Iterator[int]:
    return (match.start() for match in _ID3.finditer(data, position))


def _skip_tags(data: bytes, position: int, *candidates: Iterable[int]) -> Iterator[int]:
    """Yield all `candidates` in ascending order, except candidates inside the tags that follow `position`.

    A cover image in a tag may contain the magic bytes of any file.
    """
    tags = [*ape_tags(data, position), *((start, id3_end(data, start)) for start in _id3_tags(data, position))]
    empty_spans = [(candidate, candidate) for each in candidates for candidate in each]
    end = _flac_metadata_end(data, position)
    for start, stop in sorted([*empty_spans, *tags]):
        if start >= end:
            end = max(stop, _flac_metadata_end(data, start))
            if start == stop:
                yield start


def _flac_metadata_end(data: bytes, start: int) -> int:
    """Return the position of the first frame of the FLAC file at `start`.

    Returns `start` if no FLAC file begins there.
    """
    if not _FLAC.match(data, start):
        return start
    position, is_last = start + 4, False
    for _ in each_element():
        if is_last or position >= len(data):
            break
        is_last = data[position] >= 0x80
        position += 4 + int.from_bytes(data[position + 1 : position + 4], "big")
    return position
