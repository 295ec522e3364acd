"""Finds MP3 and AAC frames and their lengths in bytes; FFmpeg does not report them."""

from __future__ import annotations

import re
from collections.abc import Iterator

# kbit/s by four bits of a frame's header: Layer III and II of MPEG 1, and both of MPEG 2 and 2.5
_LAYER_2_KBIT = (0, 32, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 0)
_LAYER_3_KBIT = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0)
_MPEG_2_KBIT = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0)
_MPEG_1_RATES = (44_100, 48_000, 32_000, 0)
_RUN_FRAMES = 4  # of one kind, one behind the other: they are not met by chance
MP3_SYNC, AAC_SYNC = re.compile(rb"\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]"), re.compile(rb"\xff[\xf0\xf1\xf8\xf9]")
ANY_SYNC = re.compile(rb"\xff[\xe2-\xe7\xf0-\xff]")
NO_FLAC_SYNC = re.compile(rb"\xff[\xe2-\xe7\xf0-\xf7\xfa-\xff]")  # frames of FLAC begin as some of AAC do


def frame_bytes(header: bytes) -> int:
    """Return the length of the MP3 or AAC (ADTS) frame that begins with these bytes, or 0 without a frame.

    A frame in Layer I or with a free bit rate has an unknown length, for which 1 is returned.
    """
    if len(header) < 6 or header[0] != 0xFF or header[1] & 0xE0 != 0xE0:
        return 0
    if header[1] & 0xF6 == 0xF0:
        return (header[3] & 3) << 11 | header[4] << 3 | header[5] >> 5
    version, is_layer_2 = header[1] >> 3 & 3, header[1] >> 1 & 3 == 2  # versions 3, 2 and 0 are MPEG 1, 2 and 2.5
    kbit = ((_LAYER_2_KBIT if is_layer_2 else _LAYER_3_KBIT) if version == 3 else _MPEG_2_KBIT)[header[2] >> 4]
    rate = _MPEG_1_RATES[header[2] >> 2 & 3] >> {3: 0, 2: 1, 0: 2}.get(version, 31)
    if header[1] >> 1 & 3 not in (1, 2) or not kbit or not rate:
        return 1
    return (144_000 if version == 3 or is_layer_2 else 72_000) * kbit // rate + (header[2] >> 1 & 1)


def frame_runs(data: bytes, position: int, syncs: re.Pattern[bytes] = ANY_SYNC) -> Iterator[int]:
    """Yield the positions from `position` on at which a run of several MP3 or AAC frames begins."""
    end = 0
    for match in syncs.finditer(data, position):
        if match.start() >= end and (end_of_run := run_end(data, match.start())):
            yield match.start()
            end = end_of_run


def run_end(data: bytes, position: int) -> int:
    """Return the position after the consecutive frames of one kind at `position`, or 0 for fewer than _RUN_FRAMES."""
    kind, count = data[position + 1 : position + 2], 0
    while (head := data[position : position + 6])[1:2] == kind and (size := frame_bytes(head)) > 1:
        position, count = position + size, count + 1
    return position if count >= _RUN_FRAMES else 0


def announced_samples(data: bytes) -> int:
    """Return the number of samples that the Xing header in the first MP3 frame announces, or 0 without the header."""
    mark = re.compile(rb"(?:Xing|Info)\x00\x00\x00.(....)", re.DOTALL).search(data, 0, frame_bytes(data[:6]))
    if mark is None or not data[mark.start() + 7] & 1:
        return 0
    return int.from_bytes(mark.group(1), "big") * (1152 if data[1] >> 3 & 3 == 3 else 576)
