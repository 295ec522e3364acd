"""Finds stop strings in a stream of text, and holds back only text that could begin a stop string."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import lru_cache


class _Matcher:
    """Finds one string in a stream of characters, at a constant cost per character (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_length = 0  # length of the longest prefix of `pattern` that the text ends with
        self._fallback_lengths = _compute_fallback_lengths(pattern)

    def feed(self, char: str) -> bool:
        """Read one character and return whether it completes the string."""
        length = self.matched_length
        if length == len(self.pattern):  # of a match that did not count
            length = self._fallback_lengths[length - 1]
        while length and self.pattern[length] != char:
            length = self._fallback_lengths[length - 1]
        self.matched_length = length + (self.pattern[length] == char)
        return self.matched_length == len(self.pattern)

    @property
    def held_length(self) -> int:
        """The length of the text that may begin the string."""
        length = self.matched_length
        return self._fallback_lengths[length - 1] if length == len(self.pattern) else length


@lru_cache(maxsize=256)
def _compute_fallback_lengths(pattern: str) -> array[int]:
    """Return, for each prefix of `pattern`, the length of its longest proper prefix that is also its suffix.

    All answers of a request, which may be a thousand, and later requests share the array, which is never changed.
    """
    fallback_lengths = array("I", bytes(array("I").itemsize * len(pattern)))
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[length] != pattern[index]:
            length = fallback_lengths[length - 1]
        length += pattern[length] == pattern[index]
        fallback_lengths[index] = length
    return fallback_lengths


class StopStrings:
    """Searches one text for several stop strings. The stop string that is completed first wins.

    If several are completed at the same character, the longest wins. The result does not depend on how the text is
    divided into calls.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool) -> None:
        # Longest first, so that the first match found at a character is the longest one there.
        self._matchers = [_Matcher(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include_stop = include_stop
        self._held_text = ""

    def feed(self, text: str, *, counts: bool = True) -> tuple[str, str | None]:
        """Return the text that can be shown now, and the stop string that was completed or None.

        With `include_stop` the shown text ends after the stop string, else before it. Without `counts` a stop string
        that is completed in `text` is shown as ordinary text. A stop string that only begins in `text` is found in a
        later call.
        """
        start = len(self._held_text)
        self._held_text += text
        for offset, char in enumerate(text, start + 1):
            matched_stop: str | None = None
            for matcher in self._matchers:
                if matcher.feed(char) and matched_stop is None:
                    matched_stop = matcher.pattern
            if matched_stop is not None and counts:
                end = offset if self._include_stop else offset - len(matched_stop)
                visible_text, self._held_text = self._held_text[:end], ""
                return visible_text, matched_stop
        num_held = max(matcher.held_length for matcher in self._matchers)
        num_visible = len(self._held_text) - num_held
        visible_text, self._held_text = self._held_text[:num_visible], self._held_text[num_visible:]
        return visible_text, None

    def release(self) -> str:
        """Return the text that is still held back, after the last text has arrived."""
        text, self._held_text = self._held_text, ""
        return text
