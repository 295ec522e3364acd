"""Finding stop strings in text that arrives in pieces, holding back no more of it than could begin one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache


class _Matcher:
    """Knuth, Morris and Pratt (1977): how much of one string the text ends with, at a constant cost a character."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched = 0  # length of the longest proper prefix of `pattern` that the text ends with
        self._fallback = _fallbacks(pattern)

    def feed(self, char: str) -> bool:
        """Take one character; True where it completes the string."""
        length = self.matched
        while length and self.pattern[length] != char:
            length = self._fallback[length - 1]
        self.matched = length + (self.pattern[length] == char)
        return self.matched == len(self.pattern)


@lru_cache(maxsize=256)
def _fallbacks(pattern: str) -> array[int]:
    """For each prefix of `pattern`, the length of its longest proper prefix that is also its suffix.

    Made once for all answers of a request, which may be a thousand, and for the requests after it: nobody changes it.
    """
    table = array("I", bytes(array("I").itemsize * len(pattern)))
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = table[length - 1]
        length += pattern[length] == pattern[index]
        table[index] = length
    return table


class StopStrings:
    """Several stop strings over one text. The first to be completed wins; of those completed together, the longest.

    What it finds does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        # Longest first, so that the first match found at a character is the longest one there.
        self._matchers = [_Matcher(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None]:
        """Text that can be shown now, and the stop string that was completed (the text then ends before or with it)."""
        start = len(self._held)
        self._held += text
        for offset, char in enumerate(text, start + 1):
            found: str | None = None
            for matcher in self._matchers:
                if matcher.feed(char) and found is None:
                    found = matcher.pattern
            if found is not None:
                end = offset if self._include else offset - len(found)
                shown, self._held = self._held[:end], ""
                return shown, found
        keep = max(matcher.matched for matcher in self._matchers)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown, None

    def release(self) -> str:
        """What is still held back, when no more text will come."""
        text, self._held = self._held, ""
        return text
