"""One rank of a sum over processes, its kernels interpreted: `python all_reduce_rank.py FOLDER RANK RANKS STEPS`.

The inboxes are files that all ranks map. Prints "equal" where every sum is what it has to be.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from meltcore.kernels.all_reduce import Peers, inbox_bytes, new_steps, one_shot_largest, one_shot_sum

COUNTS = (8, 1504, 64, 520)


def main(folder: Path, rank: int, ranks: int, steps: int) -> None:
    inboxes = [
        np.memmap(folder / f"inbox-{each}", dtype=np.int64, mode="r+", shape=(inbox_bytes(ranks) // 8,))
        for each in range(ranks)
    ]
    addresses = torch.tensor([inbox.ctypes.data for inbox in inboxes])
    peers = Peers(addresses, new_steps(torch.device("cpu")), rank)
    for step in range(steps):
        count = COUNTS[step % len(COUNTS)]
        numbers = torch.arange(count, dtype=torch.float32) + step
        found = one_shot_sum(numbers * (rank + 1), peers, torch.full((count,), 0.5))
        assert torch.equal(found, numbers * ranks * (ranks + 1) / 2 + 0.5), f"sum {step}"
        keys = (torch.arange(3) + step) * (1 if rank else -1)
        assert torch.equal(one_shot_largest(keys, peers), (torch.arange(3) + step)), f"largest {step}"
    print("equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
