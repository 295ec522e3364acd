"""One rank of an all-reduce over processes, interpreted, which rank_processes.py starts.

The buffers are files that all ranks map. Prints "equal" if every result is right.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch

from meltcore.kernels.comm import all_reduce as all_reduce_file
from meltcore.kernels.comm.all_reduce import all_reduce, all_reduce_max, all_reduce_rms_norm
from meltcore.kernels.comm.buffer_sizes import chunk_words
from meltcore.kernels.comm.symmetric_memory import SymmetricMemory
from meltcore.kernels.norm import Norm, rms_norm

COUNTS = (8, 1504, 64, 520, 1024)


def main(folder: Path, rank: int, ranks: int, steps: int) -> None:
    buffers = [
        np.memmap(folder / f"buffer-{each}", dtype=np.uint8, mode="r+", shape=(4 * chunk_words(ranks),))
        for each in range(ranks)
    ]
    memory = SymmetricMemory.of([buffer.ctypes.data for buffer in buffers], rank, torch.device("cpu"))
    for step in range(2 * steps):
        all_reduce_file._TWO_SHOT_SAVES_BYTES = 2**40 if step < steps else 0  # one-shot, then two-shot
        count = COUNTS[step % len(COUNTS)]
        numbers = torch.arange(count, dtype=torch.float32) + step
        expected = numbers * ranks * (ranks + 1) / 2 + 0.5
        found = all_reduce(numbers * (rank + 1), memory, torch.full((count,), 0.5))
        assert torch.equal(found, expected), f"sum {step}"
        norm = Norm(torch.full((count,), 2.0), 1e-6)
        residual = torch.full((1, count), 0.5)
        total, normalized = all_reduce_rms_norm(numbers[None] * (rank + 1), memory, norm, residual)
        assert torch.equal(total[0], expected), f"sum before norm {step}"
        torch.testing.assert_close(normalized, rms_norm(total, *norm))
        keys = (torch.arange(3) + step) * (1 if rank else -1)
        assert torch.equal(all_reduce_max(keys, memory), (torch.arange(3) + step)), f"maximum {step}"
    sys.stdout.write("equal\n")  # in one piece, where print writes two without a buffer
