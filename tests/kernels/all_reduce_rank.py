"""One rank of a sum over processes, its kernels interpreted: `python all_reduce_rank.py FOLDER RANK RANKS STEPS`.

The inboxes are files that all ranks map. Prints "equal" where every sum is what it has to be.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from meltcore.kernels.all_reduce import (
    inbox_bytes,
    make_peers,
    one_shot_largest,
    one_shot_sum,
    one_shot_sum_normalised,
)
from meltcore.kernels.norm import Norm, rms_norm

COUNTS = (8, 1504, 64, 520)


def main(folder: Path, rank: int, ranks: int, steps: int) -> None:
    inboxes = [
        np.memmap(folder / f"inbox-{each}", dtype=np.int64, mode="r+", shape=(inbox_bytes(ranks) // 8,))
        for each in range(ranks)
    ]
    peers = make_peers([inbox.ctypes.data for inbox in inboxes], rank, torch.device("cpu"))
    for step in range(steps):
        count = COUNTS[step % len(COUNTS)]
        numbers = torch.arange(count, dtype=torch.float32) + step
        expected = numbers * ranks * (ranks + 1) / 2 + 0.5
        found = one_shot_sum(numbers * (rank + 1), peers, torch.full((count,), 0.5))
        assert torch.equal(found, expected), f"sum {step}"
        norm = Norm(torch.full((count,), 2.0), 1e-6)
        residual = torch.full((1, count), 0.5)
        total, normalised = one_shot_sum_normalised(numbers[None] * (rank + 1), peers, norm, residual)
        assert torch.equal(total[0], expected), f"normalised sum {step}"
        torch.testing.assert_close(normalised, rms_norm(total, *norm))
        keys = (torch.arange(3) + step) * (1 if rank else -1)
        assert torch.equal(one_shot_largest(keys, peers), (torch.arange(3) + step)), f"largest {step}"
    print("equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
