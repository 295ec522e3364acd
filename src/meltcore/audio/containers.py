"""Finds where audio files begin, end and join, from their bytes alone. Decoders see complete files only.

If the bytes of a file end early, FFmpeg and libsndfile return a shorter decoding without an error. If several files
were joined, both libraries read only the first. So the elements at the top level of each container are counted here
first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

from meltcore.audio.checks import each_element, refusal
from meltcore.audio.marks import (
    ASF_HEADER,
    M2TS_MARK,
    TS_MARK,
    ape_tags,
    file_starts,
    id3_end,
    starts_after_aac,
    starts_after_flac,
    starts_after_mp3,
    starts_after_others,
)
from meltcore.audio.media_files import (
    split_amr,
    split_asf,
    split_avi,
    split_flv,
    split_matroska,
    split_mp4,
    split_ogg,
    split_ts,
    split_wavpack,
)
from meltcore.audio.mpeg import frame_runs, run_end
from meltcore.audio.sample_files import restore_sizes, split_aiff, split_au, split_caf, split_w64, split_wav


class Container(NamedTuple):
    """A container format, with FFmpeg's name for it and the name that errors show.

    With `is_timed`, the packets have times, which may leave gaps. With `has_zero`, the times count from zero instead of
    from the first packet.
    """

    ffmpeg_name: str
    shown_name: str
    is_timed: bool = False
    has_zero: bool = False


WAV, FLAC, OGG = Container("wav", "WAV"), Container("flac", "FLAC"), Container("ogg", "OGG", is_timed=True)
MP4 = Container("mp4", "MP4 or M4A", is_timed=True, has_zero=True)
MATROSKA = Container("matroska", "WebM or Matroska", is_timed=True, has_zero=True)
AAC, AMR, WAVPACK = Container("aac", "AAC"), Container("amr", "AMR"), Container("wv", "WavPack")
AVI, ASF = Container("avi", "AVI"), Container("asf", "WMA or ASF", is_timed=True)
FLV, MPEG_TS = Container("flv", "FLV", is_timed=True), Container("mpegts", "MPEG-TS", is_timed=True)
AIFF, _AU, CAF, _W64 = (
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
        (rb"FORM....AIF[FC]", AIFF),
        (rb"\.snd", _AU),
        (rb"caff\x00", CAF),
        (rb"riff\x2e\x91\xcf\x11", _W64),
        (rb"#!AMR", AMR),
        (rb"RIFF....AVI ", AVI),
        (re.escape(ASF_HEADER), ASF),
        (rb"FLV\x01", FLV),
        (rb"wvpk", WAVPACK),
        (TS_MARK, MPEG_TS),
        (M2TS_MARK, MPEG_TS),
        (rb"\xff[\xf0\xf1\xf8\xf9]", AAC),
    )
)
_MAX_LEAD_BYTES = 1024  # such as a byte order mark, the head of an HTTP response, or the end of a page of Ogg
_MAX_TAG_BYTES = 2**24  # with the first frames behind it
_EXACT = (WAVPACK, AMR)  # whose decoders fail at bytes behind them, such as tags
_TAGS, _MAX_TRAILER_BYTES = (b"APETAGEX", b"ID3", b"TAG"), 1024
_MAX_JOINED, _MAX_OTHERS = 500, 16  # files in one, and of these such that follow one of another container


def find_container(data: bytes, position: int = 0) -> Container | None:
    """Return the container whose magic bytes are at `position`.

    Returns None for MP3, and for data that FFmpeg must not read.
    """
    return next((container for magic, container in _MAGICS if magic.match(data, position)), None)


def strip_lead(data: bytes) -> bytes:
    """Return a file without the bytes before it: zero bytes, ID3v2 tags, and other bytes before most containers.

    At most _MAX_LEAD_BYTES of other bytes are removed. FFmpeg itself skips other bytes before MP3 and AAC. Raises
    RequestError for a tag without a file.
    """
    start = 0
    for _ in each_element():
        if data[start : start + 3] == b"ID3" and len(data) >= start + 10:
            start = id3_end(data, start)
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
    if find_container(data, start) is None:
        later = file_starts(data, start, start + _MAX_LEAD_BYTES)[:1]
        start = later[0] if later else start
        if data[:1] == b"\x00" and not later and data[start] != 0xFF:  # other formats begin with zeros, as HTK does
            return data
    return data[start:] if start else data


def split_joined_files(data: bytes) -> list[bytes]:
    """Return the files that were joined to this upload, in order. Most uploads are one file.

    MP3 and AAC are sequences of frames, which decoders read to their end even if they come from several files. Raises
    RequestError for a truncated file.
    """
    pieces: list[bytes] = []
    for _ in range(_MAX_OTHERS):
        data = strip_lead(data)
        container = find_container(data) or _frames_container(data)
        starts, next_start, tail_start = [0], 0, 0
        for end in _SPLITTERS[container](data):
            next_container = _container_at(data, end)  # splitters yield each place where a file may begin
            if next_container is container:
                starts.append(end)
            elif next_container:
                next_start = end
                break
            else:
                tail_start = end
            if len(pieces) + len(starts) > _MAX_JOINED:
                raise refusal(f"is joined from more than {_MAX_JOINED} files, the limit")
        if tail_start and not next_start:
            next_start = next((each for each in starts_after_others(data, tail_start) if _container_at(data, each)), 0)
        stop = next_start or len(data)
        if tail_start and container in _EXACT:
            stop = tail_start
            _check_tag(data[tail_start:next_start] if next_start else data[tail_start:])
        pieces += [data] if (starts, stop) == ([0], len(data)) else [data[a:b] for a, b in pairwise([*starts, stop])]
        if not next_start:
            return [restore_sizes(piece) for piece in pieces]
        data = data[next_start:]
    raise refusal(f"is joined from files of different formats more than {_MAX_OTHERS} times, the limit")


def _frames_container(data: bytes) -> Container:
    """Return MP3 or AAC for data without magic bytes. Other bytes may come before the first frame."""
    first = next(frame_runs(data, 0), 0)
    return AAC if find_container(data, first) is AAC else MP3


def _check_tag(data: bytes) -> None:
    """Raise RequestError if the bytes after the last frame are too many, not all zero, and not a tag."""
    is_tag = data.startswith(_TAGS) or any(start == 0 for start, _ in ape_tags(data))
    if len(data) > _MAX_TRAILER_BYTES and any(data) and not is_tag:
        raise refusal(f"has {len(data)} bytes behind its last frame that are neither a frame nor a tag")


def _container_at(data: bytes, position: int) -> Container | None:
    """Return the container of the file that begins at `position`, perhaps with an ID3v2 tag, or None without a file."""
    first = position
    if data[position : position + 3] == b"ID3" and len(data) > position + 10:
        first = next(frame_runs(data[: position + _MAX_TAG_BYTES], id3_end(data, position)), 0)
    return find_container(data, position) or (MP3 if run_end(data, first) else None)


_SPLITTERS: dict[Container, Callable[[bytes], Iterator[int]]] = {
    WAV: split_wav,
    FLAC: starts_after_flac,
    MP3: starts_after_mp3,
    AAC: starts_after_aac,
    AMR: split_amr,
    OGG: split_ogg,
    MP4: split_mp4,
    MATROSKA: split_matroska,
    AIFF: split_aiff,
    _AU: split_au,
    CAF: split_caf,
    _W64: split_w64,
    AVI: split_avi,
    ASF: split_asf,
    FLV: split_flv,
    MPEG_TS: split_ts,
    WAVPACK: split_wavpack,
}
