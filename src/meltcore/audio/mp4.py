"""Counts the boxes and packets of MP4 files, to find joined files and missing data."""

from __future__ import annotations

from collections.abc import Iterator

from meltcore.audio.checks import each_element, refusal, truncation_error

# Boxes of MP4 that count packets, with the place of that number, and those that hold them
_INDEX_COUNTS = {b"stsz": 16, b"stz2": 16, b"trun": 12}
_INDEX_PARENTS = frozenset([b"moov", b"trak", b"mdia", b"minf", b"stbl", b"moof", b"traf"])
_MAX_DEPTH = 10  # as in FFmpeg
_MAX_SAMPLES_PER_BYTE = 16


def split_mp4(data: bytes) -> Iterator[int]:
    """Yield the position at which the next MP4 file begins. Raises RequestError for a file with missing samples."""
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
    """Return whether a file has its packets in fragments (moof), as segments for streaming do."""
    return any(name == b"moof" for _, _, name in _boxes(data, 0, len(data), each_element()))


def _boxes(data: bytes, position: int, end: int, steps: Iterator[None]) -> Iterator[tuple[int, int, bytes]]:
    """Yield position, size and name of each box. The last box may be longer than the data, or extend to its end."""
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
