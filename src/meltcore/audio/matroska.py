"""Counts the elements of WebM and Matroska files, to find joined files and missing packets."""

from __future__ import annotations

from collections.abc import Iterator

from meltcore.audio.checks import each_element, truncation_error

_EBML, _SEGMENT, _CLUSTER = 0x1A45DFA3, 0x18538067, 0x1F43B675
# Of seeking, information, tracks, clusters, cues, attachments, chapters and tags: these end a cluster without a size.
_TOP_LEVEL = frozenset(
    [0x114D9B74, 0x1549A966, 0x1654AE6B, _CLUSTER, 0x1C53BB6B, 0x1941A469, 0x1043A770, 0x1254C367, _EBML, _SEGMENT]
)


def split_matroska(data: bytes) -> Iterator[int]:
    """Yield where the next Matroska file begins. Raises RequestError for a file with missing packets.

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
        if element == 0 and body <= len(data):
            return  # bytes that are none of the file's
        is_open = (is_open and element not in _TOP_LEVEL) or (element == _CLUSTER and size is None)
        if element == _SEGMENT or (element == _CLUSTER and size is None):
            segment_end = body + size if element == _SEGMENT and size is not None else segment_end
            position = body
        elif size is None or body + size > len(data):
            if is_open or element == _CLUSTER:
                raise truncation_error(size or 0, max(len(data) - body, 0))
            return
        else:
            position = body + size
        last = element
    if last == _CLUSTER and segment_end > len(data):
        raise truncation_error(segment_end, len(data))


def _read_element(data: bytes, position: int) -> tuple[int, int | None, int]:
    """Return an element's id, its size (None if unknown) and where its content begins. No element has the id 0."""
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
