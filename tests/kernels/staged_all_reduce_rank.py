"""One rank of a staged all-reduce over processes, interpreted, which rank_processes.py starts.

The buffers are files that all ranks map. Prints "equal" if every result is right. Ranks pause at different times.
missing: the stage, 0 or 1, after which no rank tells that its data has arrived, and none waits.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import torch

from meltcore.kernels.comm import staged_all_reduce as staged_file
from meltcore.kernels.comm.buffer_sizes import buffer_bytes
from meltcore.kernels.comm.staged_all_reduce import staged_all_reduce_rms_norm, staged_combine_all_reduce_rms_norm
from meltcore.kernels.comm.symmetric_memory import SymmetricMemory
from meltcore.kernels.norm import Norm, rms_norm

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


def main(folder: Path, rank: int, ranks: int, steps: int, missing: int | None = None) -> None:
    exchange = staged_file._exchange
    staged_file._exchange = lambda stage, memory: None if stage == missing else exchange(stage, memory)
    buffers = [
        np.memmap(folder / f"buffer-{each}", dtype=np.uint8, mode="r+", shape=(buffer_bytes(ranks),))
        for each in range(ranks)
    ]
    memory = SymmetricMemory.of([buffer.ctypes.data for buffer in buffers], rank, torch.device("cpu"))
    staged_file.MESSAGE_WORDS, staged_file._TILE_WORDS = 512, 64
    for step in range(steps):
        dtype = DTYPES[step % len(DTYPES)]
        size = (64, 40, 32)[step % 3]
        rows = (
            2 * staged_file.rows_per_message(size * dtype.itemsize // 4, ranks) + 1 + step
        )  # the third message is short
        norm = Norm(torch.full((size,), 2.0, dtype=dtype), 1e-6)
        numbers = torch.arange(rows * size).view(rows, size).remainder(7).to(dtype)  # small enough for exact sums
        residual = torch.full((rows, size), 2.0, dtype=dtype)
        if (rank + step) % ranks == 0:
            time.sleep(0.3)
        total, normalized = staged_all_reduce_rms_norm(numbers * (rank + 1), memory, norm, residual)
        assert total is residual
        assert torch.equal(total, numbers * (ranks * (ranks + 1) // 2) + 2), f"sum {step}"
        torch.testing.assert_close(normalized, rms_norm(total, *norm))
        total, _ = staged_all_reduce_rms_norm(numbers * (rank + 1), memory, norm)
        assert torch.equal(total, numbers * (ranks * (ranks + 1) // 2)), f"sum without residual {step}"
        outputs = torch.stack([numbers, numbers], dim=1).view(2 * rows, size)
        weights = torch.tensor([[1.0, rank]]).expand(rows, 2).contiguous()
        residual = torch.ones(rows, size, dtype=dtype)
        total, normalized = staged_combine_all_reduce_rms_norm(outputs, memory, weights, norm, residual)
        assert torch.equal(total, numbers * (ranks * (ranks + 1) // 2) + 1), f"sum of experts {step}"
        torch.testing.assert_close(normalized, rms_norm(total, *norm))
    sys.stdout.write("equal\n")  # in one piece, where print writes two without a buffer
