"""Counts the elements of media files, to find joined files and missing data.

This module reads MP4, Matroska and WebM, Ogg, AVI, ASF, FLV, MPEG-TS, WavPack and AMR. sample_files.py reads WAV and
other formats of uncompressed samples.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from meltcore.audio.checks import each_element, refusal, truncation_error
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
# Elements of Matroska
_EBML, _SEGMENT, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1F43B675
# Of seeking, information, tracks, clusters, cues, attachments, chapters and tags: these end a cluster without a size.
_TOP_LEVEL = frozenset(
    [0x114D9B74, 0x1549A966, 0x1654AE6B, _CLUSTER, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367, _EBML, _SEGMENT]
)
# Boxes of MP4 that count packets, with the place of that number, and those that hold them
_INDEX_COUNTS = {b"stsz": 16, b"stz2": 16, b"trun": 12}
_INDEX_PARENTS = frozenset([b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"])
_MAX_DEPTH = 10  # as in FFmpeg
_MAX_SAMPLES_PER_BYTE = 16
_MIRRORED_BYTES = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))
_NO_TIME = 2**64 - 1  # of a page of Ogg on which no packet ends


def split_avi(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to an AVI file may begin, also the end of the last file.

    Raises RequestError for a file with missing packets.
    """
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
    """Yield each position at which another file joined to an ASF (WMA) file may begin, also the end of the last file.

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
    """Yield each position at which another file joined to an FLV file may begin.

    Raises RequestError for a file with missing packets.
    """
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
    """Yield each position at which another file joined to a WavPack file may begin.

    Raises RequestError for a file with missing blocks.
    """
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
    """Yield each position at which another file joined to an AMR file may begin.

    Raises RequestError for an incomplete last frame.
    """
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


def split_matroska(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to a Matroska file may begin.

    Raises RequestError for a file with missing packets.

    A live recording has a segment and clusters without a size, so that their blocks are counted one by one.
    """
    position, last, segment_end, is_open = 0, 0, 0, False  # is_open: blocks of a cluster without a size are next
    for _ in each_element():
        if position >= len(data):
            break
        if position == segment_end and position:
            yield position
        element, size, body = _read_element(data, position)
        if element == _EBML and position:
            if position != segment_end:
                yield position
            segment_end = 0
        if element == 0 and body <= len(data):  # bytes that are none of the file's
            if position < segment_end:
                raise refusal(
                    f"is damaged: {segment_end:,} bytes are announced, and nothing begins at byte {position:,}"
                )
            return
        is_open = (is_open and element not in _TOP_LEVEL) or (element == _CLUSTER and size is None)
        if element == _SEGMENT or (element == _CLUSTER and size is None):
            segment_end = body + size if element == _SEGMENT and size is not None else segment_end
            position = body
        elif size is None or body + size > len(data):
            is_cut_head = element == 0 and last == _CLUSTER and position != segment_end
            if is_open or element == _CLUSTER or is_cut_head:
                raise truncation_error(size or 0, max(len(data) - body, 0))
            return
        else:
            position = body + size
        last = element
    if last == _CLUSTER and segment_end > len(data):
        raise truncation_error(segment_end, len(data))


def _read_element(data: bytes, position: int) -> tuple[int, int | None, int]:
    """Return an element's id, its size (None if unknown) and its content's position. Without an element the id is 0."""
    id_bytes = 9 - data[position].bit_length()
    start = position + id_bytes
    if id_bytes > 4:
        return 0, None, position
    if start >= len(data):
        return 0, None, start + 1
    size_bytes = 9 - data[start].bit_length()
    body = start + size_bytes
    if size_bytes > 8 or body > len(data):
        return 0, None, body
    mask = (1 << 7 * size_bytes) - 1
    size = int.from_bytes(data[start:body], "big") & mask
    return int.from_bytes(data[position:start], "big"), None if size == mask else size, body


def split_mp4(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to an MP4 file may begin.

    Raises RequestError for a file with missing samples.
    """
    has_index, num_samples, steps = False, 0, each_element()
    for position, size, name in _boxes(data, 0, len(data), steps):
        if name == b"ftyp" and has_index:
            yield position
            has_index = False
        has_index |= name == b"moov"
        if position + size > len(data) and name in (b"mdat", b"moof", b"moov"):
            raise truncation_error(size, len(data) - position)
        if position and position + size > len(data):
            yield position  # no box, perhaps another file
        num_samples += _indexed_samples(data, position, size, name, steps)
        if num_samples > len(data):  # FFmpeg allocates memory for each before it reads one
            raise refusal(f"announces {num_samples:,} packets in {len(data):,} bytes")


def has_fragments(data: bytes) -> bool:
    """Return whether a file has its packets in fragments (moof), as files for streaming do."""
    return any(name == b"moof" for _, _, name in _boxes(data, 0, len(data), each_element()))


def _boxes(data: bytes, position: int, end: int, steps: Iterator[None]) -> Iterator[tuple[int, int, bytes]]:
    """Yield position, size and name of each box. The last box may be longer than the data."""
    for _ in steps:
        size, name = int.from_bytes(data[position : position + 4], "big"), data[position + 4 : position + 8]
        if size == 1:
            size = int.from_bytes(data[position + 8 : position + 16], "big")
        elif size == 0:
            size = end - position
        if size < 8 or position + 8 > end:  # the end, or bytes that are none of the file's
            return
        yield position, size, name
        position += size


def _indexed_samples(data: bytes, position: int, size: int, name: bytes, steps: Iterator[None], depth: int = 0) -> int:
    """Return the number of packets in the index of a box and of the boxes in it."""
    if name == b"cmov":
        raise refusal("has a compressed index (cmov), which is not read")
    if name in _INDEX_COUNTS:
        at = position + _INDEX_COUNTS[name]
        count = int.from_bytes(data[at : at + 4], "big")
        # Where all packets have one size, old files count samples, of which some codecs hold several in a byte.
        is_constant = name == b"stsz" and any(data[position + 12 : position + 16])
        return count // _MAX_SAMPLES_PER_BYTE if is_constant else count
    if name not in _INDEX_PARENTS or depth > _MAX_DEPTH:
        return 0
    inner = _boxes(data, position + 8, min(position + size, len(data)), steps)
    return sum(_indexed_samples(data, *box, steps, depth + 1) for box in inner)


def split_ogg(data: bytes) -> Iterator[int]:
    """Yield each position at which another stream or file may begin after an Ogg stream, also the end of the last one.

    Raises RequestError for an incomplete last page, and for a page with another checksum than it states: decoders leave
    it out, or decode what is damaged.
    """
    position, had_data = 0, False
    for _ in each_element():
        if (position := data.find(b"OggS", position)) < 0:
            return
        header = data[position : position + 27]
        table = data[position + 27 : position + 27 + header[26]] if len(header) == 27 else b""
        end = position + 27 + len(table) + sum(table)
        if len(header) < 27 or len(table) < header[26] or end > len(data):
            raise refusal(f"is truncated: its last page begins at byte {position} and is not complete")
        if _ogg_checksum(data[position:end]) != int.from_bytes(header[22:26], "little"):
            raise refusal(f"is damaged: its page at byte {position} has another checksum than it states")
        is_first = bool(header[5] & 2)
        if is_first and had_data:
            yield position
        had_data = not is_first
        position = end
        if data[end : end + 4] != b"OggS":
            yield end


def _ogg_checksum(page: bytes) -> int:
    """Return the CRC-32 of a page, whose own field counts as zeros. zlib begins with each byte's other end."""
    mirrored = (page[:22] + bytes(4) + page[26:]).translate(_MIRRORED_BYTES)
    inverted = zlib.crc32(mirrored, 0xFFFFFFFF) ^ 0xFFFFFFFF  # Ogg's begins with 0, and is not inverted at the end
    return int.from_bytes(inverted.to_bytes(4, "little").translate(_MIRRORED_BYTES), "big")


def first_packets(data: bytes, index: int) -> tuple[int, int]:
    """Return the end time of the first page with packets of a stream, in the stream's units, and the packet count.

    `index` counts streams in the order of their first pages. The pages with headers come before the packets and have
    the time 0.
    """
    position, num_packets, serials = 0, 0, list[bytes]()
    for _ in each_element():
        if (position := data.find(b"OggS", position)) < 0:
            return 0, 0
        header = data[position : position + 27]
        table = data[position + 27 : position + 27 + header[26]]
        position += 27 + len(table) + sum(table)
        if header[5] & 2:
            serials.append(header[14:18])
        if index < len(serials) and header[14:18] == serials[index]:
            time = int.from_bytes(header[6:14], "little")
            num_packets = 0 if time == 0 else num_packets + sum(size < 255 for size in table)
            if time not in (0, _NO_TIME):
                return time, num_packets
    return 0, 0
