"""benchmarks/staged_all_reduce.py: in processes that wait for each other, and compiled for Hopper."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import staged_all_reduce as staged_file
import torch
from compile_tools import CompilePool
from staged_all_reduce import (
    MESSAGE_WORDS,
    StagedMemory,
    buffer_bytes,
    staged_all_reduce_rms_norm,
    staged_combine_all_reduce_rms_norm,
)

from meltcore.kernels.comm import symmetric_memory
from meltcore.kernels.norm import Norm

COMPILE_LIMIT_S = 240  # on one slow core


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("row", [8, 720, 1024, 1280, 2560, 8192])
def test_longest_message_fits_into_the_buffer(ranks: int, row: int) -> None:
    """Rows of all ranks, padded to whole tiles for each, and sums have a region each; what is left holds no more."""
    _, tile_rows = staged_file._tile_size(row)
    rows = staged_file.max_rows(row, ranks)
    tiles = -(-rows // tile_rows)
    tiles_per_rank = -(-tiles // ranks)
    assert ranks * tiles_per_rank * tile_rows * row <= MESSAGE_WORDS
    assert (tiles + ranks) * tile_rows * row > MESSAGE_WORDS


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [(2, 3), (4, 1)])
def test_rank_processes_wait_for_each_other(ranks: int, steps: int, tmp_path: Path) -> None:
    """Processes map the same buffers and interpret the kernels; every call takes several messages."""
    for rank in range(ranks):
        (tmp_path / f"buffer-{rank}").write_bytes(bytes([symmetric_memory.EMPTY_BYTE]) * buffer_bytes())
    command = [sys.executable, str(Path(__file__).parent / "staged_all_reduce_rank.py"), str(tmp_path)]
    paths = [str(Path(staged_file.__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(paths)}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), str(steps)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        for rank in range(ranks)
    ]
    try:
        assert [process.communicate(timeout=120)[0] for process in processes] == ["equal\n"] * ranks
    finally:
        for process in processes:
            process.kill()
            process.wait()


def launch(top_k: int) -> None:
    pointers, messages = (torch.empty(9, dtype=torch.int64, device="meta") for _ in range(2))
    memory = StagedMemory(pointers, messages, 3, messages)
    residual = torch.empty(8192, 2048, dtype=torch.bfloat16, device="meta")
    norm = Norm(residual[0], 1e-6)
    if top_k == 0:
        staged_all_reduce_rms_norm(residual, memory, norm, residual)
    else:
        weights = torch.empty(8192, top_k, device="meta")
        outputs = torch.empty(8192 * top_k, 2048, dtype=torch.bfloat16, device="meta")
        staged_combine_all_reduce_rms_norm(outputs, memory, weights, norm, residual)


@pytest.mark.slow
def test_all_stages_compile_for_hopper(pool: CompilePool) -> None:
    binaries = pool.launch(90, launch, 0, 9).result(timeout=COMPILE_LIMIT_S)
    assert all(binary.has_code for binary in binaries)
    assert {binary.kernel for binary in binaries} == {
        "_send_rows_kernel",
        "_exchange_kernel",
        "_reduce_rows_kernel",
        "_receive_sums_kernel",
    }
