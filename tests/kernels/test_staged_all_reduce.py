"""All-reduces in stages: in processes that wait for each other, and of one rank whose peer is lost."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from rank_processes import run_ranks

from meltcore.kernels.comm import staged_all_reduce as staged_file
from meltcore.kernels.comm.buffer_sizes import MESSAGE_WORDS, buffer_bytes
from meltcore.kernels.comm.staged_all_reduce import (
    can_stage,
    staged_all_reduce_rms_norm,
    staged_combine_all_reduce_rms_norm,
)
from meltcore.kernels.comm.symmetric_memory import EMPTY_BYTE, SymmetricMemory, aborted_memory
from meltcore.kernels.norm import Norm


@pytest.mark.parametrize("ranks", [2, 8])
@pytest.mark.parametrize("row", [8, 720, 1024, 1280, 2560, 8192])
def test_longest_message_fits_into_the_buffer(ranks: int, row: int) -> None:
    """Rows of all ranks, padded to whole tiles for each, and sums have a region each; what is left holds no more."""
    _, tile_rows = staged_file._tile_size(row)
    rows = staged_file.rows_per_message(row, ranks)
    tiles = -(-rows // tile_rows)
    tiles_per_rank = -(-tiles // ranks)
    assert ranks * tiles_per_rank * tile_rows * row <= MESSAGE_WORDS
    assert (tiles + ranks) * tile_rows * row > MESSAGE_WORDS


def test_can_stage_checks_rows() -> None:
    assert can_stage(torch.empty(3, 16384, dtype=torch.bfloat16))
    assert not can_stage(torch.empty(3, 16392, dtype=torch.bfloat16)), "more than a program holds"
    assert not can_stage(torch.empty(3, 1004, dtype=torch.bfloat16)), "not aligned to 16 bytes"
    assert not can_stage(torch.empty(16, 3).t())


def staged_ranks(folder: Path, ranks: int, steps: int, *missing: int) -> tuple[str, str]:
    """What rank processes write that map the same buffers; every call takes several messages."""
    for rank in range(ranks):
        (folder / f"buffer-{rank}").write_bytes(bytes([EMPTY_BYTE]) * buffer_bytes(ranks))
    return run_ranks("staged_all_reduce_rank", folder, ranks, steps, *missing)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "steps"), [(2, 3), (4, 1)])
def test_rank_processes_wait_for_each_other(ranks: int, steps: int, tmp_path: Path) -> None:
    assert staged_ranks(tmp_path, ranks, steps) == ("equal\n" * ranks, "")


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1], ids=["rows", "sums"])
def test_results_are_wrong_without_the_wait_of_a_stage(stage: int, tmp_path: Path) -> None:
    """So the test above checks that each rank waits. The other rank may then wait for one that has failed."""
    assert "AssertionError" in staged_ranks(tmp_path, 2, 3, stage)[1]


def message(device: torch.device) -> tuple[torch.Tensor, Norm]:
    rows = torch.ones(4, 64, device=device)
    return rows, Norm(rows[0].clone(), 1e-6)


@pytest.mark.parametrize("stage", [0, 1], ids=["for-rows", "for-sums"])
def test_abort_ends_the_wait_for_a_lost_rank(stage: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All later reductions end as well."""
    monkeypatch.setattr(staged_file, "POLLS", 8)  # the interpreter takes a millisecond each
    buffers = [torch.full((buffer_bytes(2),), EMPTY_BYTE, dtype=torch.uint8, device=device) for _ in range(2)]
    memory = SymmetricMemory.of([buffer.data_ptr() for buffer in buffers], 0, device)
    if stage == 1:  # rank 1 has told that its rows have arrived, then is lost
        counters = buffers[0].view(torch.int64)[-(2 * MESSAGE_WORDS + 8) // 2 :]
        counters[0] += 1
    rows, norm = message(device)
    timer = threading.Timer(0.2, memory.abort)
    timer.start()
    for _ in range(2):
        staged_all_reduce_rms_norm(rows, memory, norm)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert memory.abort_flag.item() == 1  # the wait had not ended before
    timer.join()
    assert memory.messages.tolist() == [2, 2]
    assert buffers[1].view(torch.int64)[-(2 * MESSAGE_WORDS + 8) // 2].item() == 1, "rank 0 has told twice, from -1 on"


def test_detached_memory_neither_sends_nor_waits(device: torch.device) -> None:
    buffers = [torch.full((buffer_bytes(2),), EMPTY_BYTE, dtype=torch.uint8, device=device) for _ in range(2)]
    alone = aborted_memory(SymmetricMemory.of([buffer.data_ptr() for buffer in buffers], 0, device))
    rows, norm = message(device)
    total, normalized = staged_all_reduce_rms_norm(rows, alone, norm, rows.clone())
    weights = torch.ones(2, 2, device=device)
    staged_combine_all_reduce_rms_norm(rows, alone, weights, norm, rows[:2].clone())
    assert total.shape == normalized.shape == rows.shape
    assert not alone.messages.any()
    assert all(buffer.eq(EMPTY_BYTE).all() for buffer in buffers)
