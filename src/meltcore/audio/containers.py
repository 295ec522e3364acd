"""Finds where audio files begin, end and join, from their bytes alone: no decoder sees what is not a whole file.

FFmpeg and libsndfile end an answer early where the bytes of a file end early, and both read one file of several that
were joined. So the elements at the top of each container are counted here first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from meltcore.audio.checks import each_element, refusal
from meltcore.audio.matroska import split_matroska
from meltcore.audio.mp4 import split_mp4
from meltcore.audio.mpeg import frame_bytes
from meltcore.audio.sample_files import split_aiff, split_au, split_caf, split_w64, split_wav, with_sizes


class Container(NamedTuple):
    """A format by FFmpeg's name and by its common one. is_timed: its packets have times that may leave gaps."""

    ffmpeg_name: str
    shown_name: str
    is_timed: bool = False


WAV, FLAC, OGG = Container("wav", "WAV"), Container("flac", "FLAC"), Container("ogg", "OGG", is_timed=True)
MP4 = Container("mp4", "MP4 or M4A", is_timed=True)
MATROSKA = Container("matroska", "WebM or Matroska", is_timed=True)
AAC, AMR = Container("aac", "AAC"), Container("amr", "AMR")
_AIFF, _AU, _CAF, _W64 = (
    Container("aiff", "AIFF"),
    Container("au", "AU"),
    Container("caf", "CAF"),
    Container("w64", "W64"),
)
# MP3 has no mark at its beginning: FFmpeg looks for frames in what is nothing else.
MP3 = Container("mp3", "MP3")

_FIRST_BOX = re.compile(rb"[\x00\x01]...(?:ftyp|styp|moov|mdat|wide|pnot)", re.DOTALL)
_ZEROS = re.compile(rb"\x00+")
_MAGICS: tuple[tuple[re.Pattern[bytes], Container], ...] = tuple(
    (re.compile(pattern, re.DOTALL), container)
    for pattern, container in (
        (rb"(?:RIFF|RIFX|RF64|BW64)....WAVE", WAV),
        (rb"fLaC", FLAC),
        (rb"OggS", OGG),
        (_FIRST_BOX.pattern, MP4),
        (rb"\x1a\x45\xdf\xa3", MATROSKA),
        (rb"FORM....AIF[FC]", _AIFF),
        (rb"\.snd", _AU),
        (rb"caff\x00", _CAF),
        (rb"riff\x2e\x91\xcf\x11", _W64),
        (rb"#!AMR", AMR),
        (rb"\xff[\xf0\xf1\xf8\xf9]", AAC),
    )
)
# Where a file begins among other bytes: marks that are too long to be met by chance
_START = re.compile(
    rb"OggS\x00\x02|fLaC[\x00\x80]\x00\x00\x22|(?:RIFF|RF64)....WAVE|FORM....AIF[FC]|\x00\x00\x00.ftyp"
    rb"|\x1a\x45\xdf\xa3(?:[\x80-\xff]|\x01\x00{6}.)\x42\x86",
    re.DOTALL,
)
_START_AFTER_FLAC = re.compile(_START.pattern + rb"|ID3[\x02-\x04]\x00", re.DOTALL)
_MAX_LEAD_BYTES = 1024  # such as a byte order mark, the head of an HTTP response, or the end of a page of Ogg
_MIN_MP3_BYTES = 4096  # behind another file; less is a tag
_MAX_JOINED, _MAX_OTHERS = 500, 16  # files in one, and of these such that follow one of another container


def container_of(data: bytes) -> Container | None:
    """Return the container whose mark the data begins with; None for MP3 and for all that FFmpeg is not to read."""
    return next((container for magic, container in _MAGICS if magic.match(data)), None)


def without_lead(data: bytes) -> bytes:
    """Return a file without what is before it: zero bytes, ID3v2 tags, and a little else before most containers.

    FFmpeg itself skips other bytes before MP3 and AAC. Raises RequestError for a tag alone.
    """
    start = 0
    for _ in each_element():
        if data[start : start + 3] == b"ID3" and len(data) >= start + 10:
            length = sum((byte & 127) << 7 * place for place, byte in enumerate(data[start + 9 : start + 5 : -1]))
            start += 10 + length + (10 if data[start + 5] & 0x10 else 0)
            if start >= len(data):
                raise refusal(f"is truncated: its tag (ID3) ends at byte {start}, and it has {len(data)}")
        elif zeros := _ZEROS.match(data, start):
            # The first box of an MP4 file begins with its size, whose first bytes are zeros.
            box = _FIRST_BOX.search(data, start, zeros.end() + 8)
            if box:
                start = box.start()
                break
            if zeros.end() == len(data):
                break
            start = zeros.end()
        else:
            break
    if container_of(data[start : start + 16]) is None:
        later = _START.search(data, start, start + _MAX_LEAD_BYTES)
        start = later.start() if later else start
        if data[:1] == b"\x00" and not later and data[start] != 0xFF:  # other formats begin with zeros, as HTK does
            return data
    return data[start:] if start else data


def parts(data: bytes) -> list[bytes]:
    """Return the files that were joined to this one, in order: mostly one. Raises RequestError for a truncated file.

    MP3, AAC and AMR are sequences of frames, which decoders read to their end however many files they come from.
    """
    pieces: list[bytes] = []
    for _ in range(_MAX_OTHERS):
        data = without_lead(data)
        container = container_of(data[:16]) or MP3
        starts, other = [0], 0
        for end in _SPLITTERS.get(container, _split_frames)(data):
            follows = _container_at(data, end)  # splitters yield each place where a file may begin
            if follows is container:
                starts.append(end)
            elif follows:
                other = end
                break
            if len(pieces) + len(starts) > _MAX_JOINED:
                raise refusal(f"is joined from more than {_MAX_JOINED} files, the limit")
        stop = other or len(data)
        pieces += [data] if (starts, stop) == ([0], len(data)) else [data[a:b] for a, b in pairwise([*starts, stop])]
        if not other:
            return [with_sizes(piece) for piece in pieces]
        data = data[other:]
    raise refusal(f"is joined from files of different formats more than {_MAX_OTHERS} times, the limit")


def _container_at(data: bytes, position: int) -> Container | None:
    """Return the container of a file that begins here, None for a tag or other bytes."""
    head = data[position : position + 16]
    is_mp3 = head[:3] == b"ID3" or frame_bytes(head) > 1
    return container_of(head) or (MP3 if is_mp3 and len(data) - position > _MIN_MP3_BYTES else None)


def _split_frames(data: bytes) -> Iterator[int]:
    """Yield where a file with a mark begins among frames, whose own length is not known here."""
    return (match.start() for match in _START.finditer(data, 1))


def _split_flac(data: bytes) -> Iterator[int]:
    """Yield where a file may begin among frames of FLAC. In MP3 and AAC, tags between frames are left to FFmpeg."""
    return (match.start() for match in _START_AFTER_FLAC.finditer(data, 1))


def _split_ogg(data: bytes) -> Iterator[int]:
    """Yield where a stream begins after the pages of another one. Raises RequestError for an incomplete last page."""
    position, had_data = 0, False
    for _ in each_element():
        if (position := data.find(b"OggS", position)) < 0:
            return
        header = data[position : position + 27]
        table = data[position + 27 : position + 27 + header[26]] if len(header) == 27 else b""
        end = position + 27 + len(table) + sum(table)
        if len(header) < 27 or len(table) < header[26] or end > len(data):
            raise refusal(f"is truncated: its last page begins at byte {position} and is not complete")
        is_first = bool(header[5] & 2)
        if is_first and had_data:
            yield position
        had_data = not is_first
        position = end
        if data[end : end + 4] != b"OggS":
            yield end


_SPLITTERS: dict[Container, Callable[[bytes], Iterator[int]]] = {
    WAV: split_wav,
    FLAC: _split_flac,
    OGG: _split_ogg,
    MP4: split_mp4,
    MATROSKA: split_matroska,
    _AIFF: split_aiff,
    _AU: split_au,
    _CAF: split_caf,
    _W64: split_w64,
}
