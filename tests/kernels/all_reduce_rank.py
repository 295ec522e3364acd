"""One rank of a sum over processes, its kernels interpreted: `python all_reduce_rank.py FOLDER RANK RANKS STEPS SHOTS`.

The inboxes are files that all ranks map. Prints "equal" where every sum is what it has to be.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from meltcore.kernels import all_reduce
from meltcore.kernels.all_reduce import peer_largest, peer_sum, peer_sum_normalised
from meltcore.kernels.inbox import inbox_bytes, make_peers
from meltcore.kernels.norm import Norm, rms_norm

COUNTS = (8, 1504, 64, 520, 1024)


def main(folder: Path, rank: int, ranks: int, steps: int, shots: int) -> None:
    all_reduce._WORTH_A_SECOND_WAY = 0 if shots == 2 else 2**40
    inboxes = [
        np.memmap(folder / f"inbox-{each}", dtype=np.uint8, mode="r+", shape=(inbox_bytes(ranks),))
        for each in range(ranks)
    ]
    peers = make_peers([inbox.ctypes.data for inbox in inboxes], rank, torch.device("cpu"))
    for step in range(steps):
        count = COUNTS[step % len(COUNTS)]
        numbers = torch.arange(count, dtype=torch.float32) + step
        expected = numbers * ranks * (ranks + 1) / 2 + 0.5
        found = peer_sum(numbers * (rank + 1), peers, torch.full((count,), 0.5))
        assert torch.equal(found, expected), f"sum {step}"
        norm = Norm(torch.full((count,), 2.0), 1e-6)
        residual = torch.full((1, count), 0.5)
        total, normalised = peer_sum_normalised(numbers[None] * (rank + 1), peers, norm, residual)
        assert torch.equal(total[0], expected), f"normalised sum {step}"
        torch.testing.assert_close(normalised, rms_norm(total, *norm))
        keys = (torch.arange(3) + step) * (1 if rank else -1)
        assert torch.equal(peer_largest(keys, peers), (torch.arange(3) + step)), f"largest {step}"
    print("equal")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
