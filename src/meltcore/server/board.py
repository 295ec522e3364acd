"""Numbers that all front processes of a server share: one row each, in memory that all of them have mapped.

A front writes its own row alone and reads all of them, so a count costs no message and no lock, and whichever front is
asked knows the whole server's. A front that dies leaves its row behind, so no count is lost.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Doubles: whole numbers are exact up to 2^53, and a store of an aligned one is never seen half done.
_CELL_BYTES = 8


class Board:
    """`rows` rows of the columns `names`, all 0 at first. `fd` names the memory to another process."""

    def __init__(self, names: Sequence[str], rows: int, fd: int | None = None) -> None:
        """Make a new board, or map the one behind `fd`, which must have been made with the same names and rows."""
        self.fd = os.memfd_create("meltcore-board") if fd is None else fd
        self.column = {name: at for at, name in enumerate(names)}
        if len(self.column) != len(names):
            raise ValueError("two columns have the same name")
        size = len(names) * rows * _CELL_BYTES
        if fd is None:
            os.ftruncate(self.fd, size)
        cells = memoryview(mmap.mmap(self.fd, size)).cast("d")
        self.rows = [cells[row * len(names) : (row + 1) * len(names)] for row in range(rows)]

    def total(self, name: str) -> float:
        """The sum of a column."""
        at = self.column[name]
        return sum(row[at] for row in self.rows)

    def most(self, name: str) -> float:
        """The largest value of a column."""
        at = self.column[name]
        return max(row[at] for row in self.rows)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """For a decision on all rows together. Held for microseconds; the kernel frees a dead process's lock."""
        fcntl.lockf(self.fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self.fd, fcntl.LOCK_UN)
