"""Reads text that arrives in pieces: steps wait for the characters that they need.

Every step consumes what it reads, apart from the few characters that may begin a mark, so the whole is linear.
"""

from __future__ import annotations

import re
from collections.abc import Generator
from functools import lru_cache
from typing import Any

Steps = Generator[None, None, Any]


class Marks:
    """Finds the first of several marks, and how much of a text's end may begin one."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.pattern = re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))
        self._beginnings = {mark[:length] for mark in marks for length in range(1, len(mark))}
        self._longest = max(map(len, marks)) - 1

    def held(self, text: str, start: int) -> int:
        """Return the length of the longest end of text[start:] that may begin a mark."""
        longest = min(self._longest, len(text) - start)
        return next((length for length in range(longest, 0, -1) if text[-length:] in self._beginnings), 0)


find_marks = lru_cache(maxsize=64)(Marks)


class CharacterReader:
    """Holds the text that has come, and the steps that read it. A step yields while it needs more."""

    def __init__(self) -> None:
        self._buffer, self._at = "", 0
        self._has_ended = False
        self._raw: list[str] = []  # what was taken since it was last emptied

    def _take(self, end: int) -> str:
        text = self._buffer[self._at : end]
        self._raw.append(text)
        self._at = end
        return text

    def _some(self) -> Steps:
        """Wait for a character. Return whether there is one."""
        while self._at == len(self._buffer) and not self._has_ended:
            yield
        return self._at < len(self._buffer)

    def _piece(self, marks: Marks) -> Steps:
        """Return text up to the next mark, and the mark; or all text that has come, and None.

        Empty text and None mean that the text has ended.
        """
        while True:
            if found := marks.pattern.search(self._buffer, self._at):
                text = self._take(found.start())
                self._take(found.end())
                return text, found[0]
            held = 0 if self._has_ended else marks.held(self._buffer, self._at)
            text = self._take(len(self._buffer) - held)
            if text or self._has_ended:
                return text, None
            yield

    def _until(self, *marks: str) -> Steps:
        """Return all text up to the next mark, and the mark, or None if there is none."""
        parts: list[str] = []
        mark = None
        while mark is None:
            text, mark = yield from self._piece(find_marks(marks))
            parts.append(text)
            if not text and mark is None:
                break
        return "".join(parts), mark

    def _run_of(self, pattern: re.Pattern[str]) -> Steps:
        """Return the characters in a row of a class, which a pattern of one or more matches."""
        parts: list[str] = []
        while (yield from self._some()):
            found = pattern.match(self._buffer, self._at)
            if not found:
                break
            parts.append(self._take(found.end()))
        return "".join(parts)

    def _peek(self, *options: str) -> Steps:
        """Return the longest of the texts that comes next, or "" if none does."""
        while True:
            rest = self._buffer[self._at : self._at + max(map(len, options))]
            if self._has_ended or not any(len(rest) < len(each) and each.startswith(rest) for each in options):
                return max((each for each in options if rest.startswith(each)), key=len, default="")
            yield

    def _accept(self, text: str) -> Steps:
        """Take a text if it comes next. Return whether it did."""
        if not (yield from self._peek(text)):
            return False
        self._take(self._at + len(text))
        return True
