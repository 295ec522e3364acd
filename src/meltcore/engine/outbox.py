"""What the host sends to the device without a copy command: pinned memory that a kernel reads."""

from __future__ import annotations

import torch

# Pieces in turn. A step is launched before the one in front of it has been read, never two: none is waited for.
PIECES = 4


class Outbox:
    """torch's own pool of pinned memory, which knows of copies only, would hand a piece out too early."""

    def __init__(self, entries: int) -> None:
        """entries: int64 of a piece at first."""
        self._pieces = [(pinned(entries), torch.cuda.Event()) for _ in range(PIECES)]
        self._taken = 0

    def take(self, entries: int) -> tuple[torch.Tensor, torch.cuda.Event]:
        """[entries] int64, and the event to record once the kernel that reads it is launched."""
        index = self._taken % PIECES
        self._taken += 1
        piece, read = self._pieces[index]
        read.synchronize()
        if len(piece) < entries:
            piece = pinned(entries)
            self._pieces[index] = piece, read
        return piece[:entries], read


def pinned(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64, pin_memory=True)


def aligned(size: int) -> int:
    """Entries that `size` int64 take up to the next 16 bytes: kernels are compiled for aligned arrays."""
    return size + size % 2
