"""Reads the sizes in WAV, AIFF, AU, CAF and W64 files, to find joined files and missing samples.

Programs that write to a pipe do not know the size of the samples. They leave zero or a large number in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from meltcore.audio.checks import each_element, refusal, truncation_error
from meltcore.audio.marks import later_file_starts, starts_after_others

# The least size of samples that programs write before they know it: some write 2e9, sox 0x7ffff000, arecord 2**31.
# The load generator, which may not import this file, judges answers by the same number (wav.py).
UNKNOWN_SIZE, _UNKNOWN_LONG_SIZE = 2_000_000_000, 2**62
# Bytes after a WAV file that are no part of it. More of them would be samples that the header does not know.
_MAX_TRAILER_BYTES = 4096


def split_wav(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to a WAV file may begin, also the end of the last file.

    Placeholder sizes of programs that wrote to a pipe are ignored.
    """
    order: Literal["big", "little"] = "big" if data[:4] == b"RIFX" else "little"
    position, long_size, end = 12, 0, 0  # long_size: of the samples in RF64; end: of the samples
    for _ in each_element():
        name, size = data[position : position + 4], int.from_bytes(data[position + 4 : position + 8], order)
        rest = len(data) - position - 8
        if name in (b"RIFF", b"RIFX", b"RF64", b"BW64") and data[position + 8 : position + 12] == b"WAVE":
            yield position
            position, long_size, end = position + 12, 0, 0
            continue
        if end:
            yield position
        if rest < 0 or (end and not _is_chunk(name, size, rest)):
            break
        if name == b"ds64":
            long_size = int.from_bytes(data[position + 16 : position + 24], "little")
        elif name == b"data":
            if size == 0xFFFFFFFF and 0 < long_size < 2**62:
                size = long_size
            elif size >= UNKNOWN_SIZE or (size == 0 and not _is_chunk(data[position + 8 : position + 12], 0, rest)):
                yield from later_file_starts(data, position)
                return
            if size == 0:
                raise refusal("holds no samples")
            if size > rest:
                raise refusal(f"is truncated: {size} bytes of samples are announced, {rest} are there")
            end = position + 8 + size
        position += 8 + size + size % 2
    has_more = len(data) - position > _MAX_TRAILER_BYTES and any(data[position:])
    if end and has_more and not any(starts_after_others(data, position)):
        raise refusal(
            f"has {len(data) - end} bytes after the samples that its header announces, which end at byte {end}"
        )


def _is_chunk(name: bytes, size: int, rest: int) -> bool:
    """Return whether these may be the name and size of a chunk, with `rest` bytes after them."""
    return name.isascii() and name.decode().isprintable() and size <= rest


def split_aiff(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to an AIFF file may begin, also the end of the last file.

    Raises RequestError for a file with missing samples.
    """
    return _split(data, b"FORM", lambda head: 8 + (size := _read_number(head, 4)) + size % 2, unknown=8 + UNKNOWN_SIZE)


def split_au(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to an AU file may begin, also the end of the last file.

    Raises RequestError for a file with missing samples.
    """
    return _split(
        data, b".snd", lambda head: (size := _read_number(head, 8)) and _read_number(head, 4) + size, UNKNOWN_SIZE
    )


def split_w64(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to a W64 file may begin, also the end of the last file.

    Raises RequestError for a file with missing samples.
    """
    return _split(data, b"riff", lambda head: int.from_bytes(head[16:24], "little"), _UNKNOWN_LONG_SIZE)


def _split(data: bytes, magic: bytes, size_of: Callable[[bytes], int], unknown: int) -> Iterator[int]:
    """Yield each position at which another file joined to one with the magic bytes `magic` may begin.

    `size_of` returns the size of the file from its first 24 bytes. A size of `unknown` or more is a placeholder.
    """
    position = 0
    for _ in each_element():
        if position:
            yield position
        if data[position : position + 4] != magic:
            return
        size = size_of(data[position : position + 24])
        if not 12 < size < unknown:
            yield from later_file_starts(data, position)
            return
        if position + size > len(data) + 1:  # the last byte may be missing that makes a size even
            raise truncation_error(size, len(data) - position)
        position += size


def split_caf(data: bytes) -> Iterator[int]:
    """Yield each position at which another file joined to a CAF file may begin.

    Raises RequestError for a file with missing samples.
    """
    position = 8
    for _ in each_element():
        name, size = data[position : position + 4], _read_number(data, position + 4, 8)
        if position + 12 > len(data):
            return
        if name == b"caff":
            yield position
            position += 8
            continue
        if position + 12 + size > len(data):
            if name == b"data" and size < _UNKNOWN_LONG_SIZE:
                raise truncation_error(size, len(data) - position - 12)
            yield from later_file_starts(data, position) if name == b"data" else [position]
            return
        position += 12 + size


def restore_sizes(data: bytes) -> bytes:
    """Return an AIFF, RF64 or W64 file with the sizes that its program left out. FFmpeg needs these sizes."""
    if data[:4] in (b"RF64", b"BW64") and data[12:16] == b"ds64":
        size = int.from_bytes(data[28:36], "little")
        # With the name of a file of 32 bits, all that follows is read.
        return data if 0 < size < _UNKNOWN_LONG_SIZE else b"RIFF" + data[4:]
    if data[:4] == b"riff":
        return _restore_w64_size(data)
    if data[:4] != b"FORM":
        return data
    position, common = 12, 0
    while position + 16 <= len(data) and data[position : position + 4] != b"SSND":
        if data[position : position + 4] == b"COMM":
            common = position
        size = _read_number(data, position + 4)
        position += 8 + size + size % 2
    size, num_frames, rest = _read_number(data, position + 4), _read_number(data, common + 10), len(data) - position - 8
    frame_bytes = _read_number(data, common + 8, 2) * ((_read_number(data, common + 14, 2) + 7) // 8)
    if not common or rest < 8 or not frame_bytes or (8 < size < UNKNOWN_SIZE and 0 < num_frames < UNKNOWN_SIZE):
        return data
    num_frames_bytes = ((rest - 8) // frame_bytes).to_bytes(4, "big")
    head = b"FORM" + (len(data) - 8).to_bytes(4, "big") + data[8 : common + 10] + num_frames_bytes
    return head + data[common + 14 : position + 4] + rest.to_bytes(4, "big") + data[position + 8 :]


def _restore_w64_size(data: bytes) -> bytes:
    """Return a W64 file with the size of its samples. If the program left it out, the samples extend to the end."""
    position = 40  # behind the names and the size of the file
    for _ in each_element():
        size = int.from_bytes(data[position + 16 : position + 24], "little")
        if data[position : position + 4] == b"data" and not 24 < size < _UNKNOWN_LONG_SIZE:
            file_size_bytes, data_size_bytes = (
                count.to_bytes(8, "little") for count in (len(data), len(data) - position)
            )
            return data[:16] + file_size_bytes + data[24 : position + 16] + data_size_bytes + data[position + 24 :]
        position += size + -size % 8
        if size < 24 or position + 24 > len(data):
            break
    return data


def _read_number(data: bytes, position: int, num_bytes: int = 4) -> int:
    return int.from_bytes(data[position : position + num_bytes], "big")
