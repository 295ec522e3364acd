"""Counts the pages of Ogg files, to find joined streams, missing data, and the times of the first packets."""

from __future__ import annotations

from collections.abc import Iterator

from meltcore.audio.checks import each_element, refusal

_NO_TIME = 2**64 - 1  # of a page on which no packet ends


def split_ogg(data: bytes) -> Iterator[int]:
    """Yield the positions at which a stream begins after the pages of another one.

    Raises RequestError for an incomplete last page.
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
        is_first = bool(header[5] & 2)
        if is_first and had_data:
            yield position
        had_data = not is_first
        position = end
        if data[end : end + 4] != b"OggS":
            yield end


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
