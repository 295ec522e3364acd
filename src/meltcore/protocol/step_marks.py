"""Holds the marks of engines that share a GPU. A mark says until when its engine wants the GPU for its steps.

The supervisor makes one small file per GPU, and every engine on that GPU maps it. An engine of class interactive or
standard has a word of its own there, a time of the machine's monotonic clock. Engines of lower classes read the words.
A word lapses by itself, so an engine that dies blocks no other; the kernel releases the lock that held its word.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import get_args

from meltcore.common.errors import ConfigError
from meltcore.settings.config import PriorityClass

MAX_ENGINES = 64  # of one class on one GPU
_WORD_BYTES = 8  # a double: an aligned store is never seen half done
_CLASSES: tuple[PriorityClass, ...] = get_args(PriorityClass)
_MARKING = _CLASSES[:-1]  # no engine waits for the last class
_FILE_BYTES = len(_MARKING) * MAX_ENGINES * _WORD_BYTES


def make_marks_file(path: Path) -> None:
    """Create the file of a GPU without marks. An existing file is not changed."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.ftruncate(fd, _FILE_BYTES)
    finally:
        os.close(fd)


class StepMarks:
    """Reads and writes the marks of one GPU for an engine of one class."""

    def __init__(self, path: Path, priority_class: PriorityClass) -> None:
        """Map the file and take a word. Raises ConfigError if the file cannot be used or all words are taken."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"the file of step marks, {path}, cannot be opened: {error.strerror}") from error
        weakref.finalize(self, os.close, fd)  # until then it holds the lock
        if (num_bytes := os.fstat(fd).st_size) != _FILE_BYTES:
            raise ConfigError(f"the file of step marks, {path}, must have {_FILE_BYTES} bytes; it has {num_bytes}")
        self._memory = mmap.mmap(fd, _FILE_BYTES)
        self._words = memoryview(self._memory).cast("d")
        rank = _CLASSES.index(priority_class)
        self._higher = self._words[: rank * MAX_ENGINES]
        self._higher_bytes = len(self._higher) * _WORD_BYTES
        self._unmarked = bytes(self._higher_bytes)
        self._word: int | None = None
        if priority_class in _MARKING:
            self._word = self._take_word(fd, rank * MAX_ENGINES, f"{path}: class {priority_class}")
            self.clear()  # what a predecessor that died has left

    def mark(self, until_s: float) -> None:
        """Ask engines of lower classes to wait until a time.monotonic().

        The class `batch` is the lowest, so it asks no engine.
        """
        if self._word is not None:
            self._words[self._word] = until_s

    def clear(self) -> None:
        """Remove this engine's mark."""
        self.mark(0.0)

    def wait_until_s(self) -> float:
        """Return the latest mark of engines of higher classes, or 0 without a mark."""
        # One comparison of bytes: while no higher class works, an engine of a lower class pays for nothing more.
        if self._memory[: self._higher_bytes] == self._unmarked:
            return 0.0
        return max(self._higher)

    @staticmethod
    def _take_word(fd: int, first: int, subject: str) -> int:
        for word in range(first, first + MAX_ENGINES):
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, word)
            except OSError:  # another engine's
                continue
            return word
        raise ConfigError(f"{subject} has at most {MAX_ENGINES} engines on one GPU, and all of them run")
