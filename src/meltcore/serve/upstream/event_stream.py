"""Splits a byte stream into complete server-sent events, which are passed on unchanged.

A client parses every event that it receives. The bytes of an incomplete event are therefore held back until its end. If
the stream breaks off there, an error event can still follow.
"""

from __future__ import annotations

# A longer event is passed on in parts: its memory must stay bounded.
MAX_HELD_BYTES = 256 * 1024
# An empty line, after the end of the line before it. "\r\n\r\n" ends with the second, "\r\n\n" with the first.
_EVENT_ENDS = (b"\n\n", b"\n\r\n", b"\r\r")


class EventBuffer:
    """Cuts a stream after complete events. `add` and `end` together return all added bytes, in order."""

    __slots__ = ("_incomplete", "is_inside_event")

    def __init__(self) -> None:
        self._incomplete = b""
        self.is_inside_event = False  # of an event too long to be held, a part has been passed on

    def add(self, data: bytes) -> bytes:
        """Add bytes. Return all bytes up to the end of the last complete event, or b"" if no event is complete."""
        if self._incomplete:
            data = self._incomplete + data
            self._incomplete = b""
        if data.endswith(_EVENT_ENDS):  # nearly every read: a server writes whole events
            self.is_inside_event = False
            return data
        end = max(position + len(each) if (position := data.rfind(each)) >= 0 else 0 for each in _EVENT_ENDS)
        if len(data) - end > MAX_HELD_BYTES:
            self.is_inside_event = True
            end = len(data) - 2  # the next bytes may complete an event's end
        elif end:
            self.is_inside_event = False
        self._incomplete = data[end:]
        return data[:end]

    def end(self) -> bytes:
        """Return the bytes that are left at the end of a stream. Call this method only if `is_whole` is true."""
        return self._incomplete

    @property
    def is_whole(self) -> bool:
        """Whether the stream may end here. Empty lines do not count as an event."""
        return not self.is_inside_event and not self._incomplete.strip(b"\r\n")
