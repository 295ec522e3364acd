"""All-reduce through symmetric memory: all ranks in one process, which runs each phase of a launch for all in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import run_ranks

from meltcore.kernels.comm import all_reduce as all_reduce_file
from meltcore.kernels.comm import symmetric_memory
from meltcore.kernels.comm.all_reduce import (
    all_reduce,
    all_reduce_max,
    all_reduce_reference,
    all_reduce_rms_norm,
    all_reduce_rms_norm_reference,
    can_all_reduce,
    can_fuse_norm,
    combine_all_reduce_rms_norm,
)
from meltcore.kernels.comm.buffer_sizes import chunk_words
from meltcore.kernels.comm.symmetric_memory import PHASES_IN_TURN, SymmetricMemory, aborted_memory
from meltcore.kernels.moe.combine import combine_reference
from meltcore.kernels.norm import Norm

SEND = PHASES_IN_TURN[0]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_ranks(ranks: int, device: torch.device) -> tuple[list[torch.Tensor], list[SymmetricMemory]]:
    """Buffers, which must live as long as their addresses, and each rank's view of them."""
    size = 4 * chunk_words(ranks)
    buffers = [torch.full((size,), symmetric_memory.EMPTY_BYTE, dtype=torch.uint8, device=device) for _ in range(ranks)]
    addresses = [each.data_ptr() for each in buffers]
    return buffers, [SymmetricMemory.of(addresses, rank, device) for rank in range(ranks)]


def in_turns(launch: Callable[..., Any], memories: list[SymmetricMemory], *tensors: list[Any]) -> list[Any]:
    """Each rank's result of a launch with its own element of each list of tensors."""
    ranks = list(zip(memories, *tensors, strict=True))
    for phases in PHASES_IN_TURN[:-1]:
        for each, first, *rest in ranks:
            launch(first, each, *rest, phases=phases)
    return [launch(first, each, *rest, phases=PHASES_IN_TURN[-1]) for each, first, *rest in ranks]


@pytest.fixture(params=[1, 2], ids=["one-shot", "two-shot"])
def shots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two-shot applies only to rows that can be cut into slices."""
    monkeypatch.setattr(all_reduce_file, "_TWO_SHOT_SAVES_BYTES", 2**40 if request.param == 1 else 0)
    return int(request.param)


def assert_sum(found: torch.Tensor, expected: torch.Tensor) -> None:
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:  # another order of the sum may change a rounding, and no more
        torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=1e-3)
        assert (found != expected).float().mean() < 0.02


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dtype"), [*((2, each) for each in DTYPES), (4, torch.float32)], ids=lambda each: str(each)[-8:]
)
@pytest.mark.usefixtures("shots")
def test_all_ranks_get_the_same_sum_in_every_step(ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """Message sizes differ, so that chunks have different step counts."""
    torch.manual_seed(ranks)
    buffers, memories = make_ranks(ranks, device)
    for count in (64, 1504, 8):
        partial_sums = [torch.randn(count).to(dtype) for _ in range(ranks)]
        residual = (3 * torch.randn(count)).to(dtype)
        for added in (residual, None):
            sent = [partial_sum.clone().to(device) for partial_sum in partial_sums]
            outputs = [None if added is None else added.clone().to(device) for _ in range(ranks)]

            results = [result.cpu() for result in in_turns(all_reduce, memories, sent, outputs)]
            assert all(torch.equal(result, results[0]) for result in results)
            assert_sum(results[0], all_reduce_reference(partial_sums, added))
    assert len(buffers) == ranks


@pytest.mark.slow
@pytest.mark.usefixtures("shots")
def test_large_message_with_two_chunks_per_program(device: torch.device) -> None:
    """The last chunk is not full; then a small message uses the same chunks."""
    torch.manual_seed(1)
    buffers, memories = make_ranks(2, device)
    for count in (300 * 512 + 88, 1504):
        partial_sums = [torch.randn(count) for _ in range(2)]
        sent = [partial_sum.clone().to(device) for partial_sum in partial_sums]
        for result in in_turns(all_reduce, memories, sent):
            assert_sum(result.cpu(), all_reduce_reference(partial_sums))
    assert len(buffers) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dtype", "weight_dtype"),
    [
        (2, torch.bfloat16, torch.bfloat16),
        (2, torch.bfloat16, torch.float32),
        (2, torch.float16, torch.float16),
        (4, torch.float32, torch.float32),
    ],
    ids=["2-bfloat16", "2-bfloat16 with float32 weight", "2-float16", "4-float32"],
)
@pytest.mark.usefixtures("shots")
def test_fused_norm_matches_reference(
    ranks: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of one chunk and of several, some not full, between all-reduces with another grid."""
    torch.manual_seed(ranks)
    buffers, memories = make_ranks(ranks, device)
    for rows, size in ((1, 2568), (2, 64), (2, 2048)):
        weight = (torch.rand(size) + 0.5).to(weight_dtype)
        norm = Norm(weight.to(device), 1e-6)
        partial_sums = [torch.randn(rows, size).to(dtype) for _ in range(ranks)]
        residual = (3 * torch.randn(rows, size)).to(dtype)
        for added in (residual, None):
            sent = [partial_sum.clone().to(device) for partial_sum in partial_sums]
            outputs = [None if added is None else added.clone().to(device) for _ in range(ranks)]
            results = in_turns(all_reduce_rms_norm, memories, sent, [norm] * ranks, outputs)
            for rank, result in enumerate(results):
                assert result[0] is (sent[rank] if added is None else outputs[rank])
            assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0], strict=True))
            total, normalized = results[0]
            expected = all_reduce_rms_norm_reference(partial_sums, Norm(weight, 1e-6), added)
            assert_sum(total.cpu(), expected[0])
            assert_sum(normalized.cpu(), expected[1])
        plain = [torch.full((rows * size,), float(rank), device=device) for rank in range(ranks)]
        for result in in_turns(all_reduce, memories, plain):
            assert result.eq(ranks * (ranks - 1) / 2).all()
    assert len(buffers) == ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "dtype", "size"),
    [(2, torch.bfloat16, 1024), (4, torch.bfloat16, 2048), (2, torch.float16, 72), (2, torch.float32, 1544)],
    ids=["2-bfloat16", "4-bfloat16-two-chunks", "2-float16-part-of-a-chunk", "2-float32"],
)
@pytest.mark.usefixtures("shots")
def test_partial_sum_is_combined_from_expert_outputs(
    ranks: int, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    torch.manual_seed(size)
    buffers, memories = make_ranks(ranks, device)
    weight = torch.rand(size) + 0.5
    norm = Norm(weight.to(device), 1e-6)
    for tokens, top_k in ((3, 9), (1, 2)):
        outputs = [torch.randn(tokens * top_k, size).to(dtype) for _ in range(ranks)]
        weights = torch.rand(tokens, top_k)
        residual = (3 * torch.randn(tokens, size)).to(dtype)
        streams = [residual.clone().to(device) for _ in range(ranks)]
        given = [each.to(device) for each in outputs]
        results = in_turns(
            combine_all_reduce_rms_norm, memories, given, [weights.to(device)] * ranks, [norm] * ranks, streams
        )
        assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0], strict=True))
        assert results[1][0] is streams[1]
        partial_sums = [combine_reference(each, weights) for each in outputs]
        expected = all_reduce_rms_norm_reference(partial_sums, Norm(weight, 1e-6), residual)
        for found, right in zip(results[0], expected, strict=True):
            assert_sum(found.cpu(), right)
    assert len(buffers) == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_all_reduce_max_handles_all_signs(ranks: int, device: torch.device) -> None:
    torch.manual_seed(0)
    buffers, memories = make_ranks(ranks, device)
    for count in (1, 300):
        values = torch.randint(-(2**62), 2**62, (ranks, count))
        values[:, ::3] >>= 40  # upper halves of all ones and all zeros
        values[0, 0], values[1, 0] = -(2**63), -1
        sent = [row.clone().to(device) for row in values]
        for result in in_turns(all_reduce_max, memories, sent):
            assert torch.equal(result.cpu(), values.amax(0))
    assert len(buffers) == ranks


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.usefixtures("shots")
def test_every_nan_bit_pattern_is_received_as_nan(dtype: torch.dtype, device: torch.device) -> None:
    """Also a NaN of all ones, the value of an empty slot: the rank that reads it must not wait forever."""
    buffers, memories = make_ranks(2, device)
    partial_sum = torch.ones(64, dtype=dtype, device=device)
    partial_sum[8:12] = torch.full((4,), -1, dtype=torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
    for result in in_turns(all_reduce, memories, [partial_sum, torch.ones_like(partial_sum)]):
        assert result[8:12].isnan().all()
        assert result[:8].eq(2).all()
        assert result[12:].eq(2).all()
    assert all(each.eq(symmetric_memory.EMPTY_BYTE).all() for each in buffers)


@pytest.mark.usefixtures("shots")
def test_step_counter_may_overflow(device: torch.device) -> None:
    buffers, memories = make_ranks(2, device)
    for each in memories:
        each.steps.fill_(2**31 - 2)
    for _ in range(4):
        partial_sums = [torch.randn(40, device=device) for _ in range(2)]
        expected = partial_sums[0] + partial_sums[1]
        for result in in_turns(all_reduce, memories, partial_sums):
            assert torch.equal(result, expected)
    assert int(memories[0].steps[0]) == -(2**31) + 2
    assert len(buffers) == 2


def test_abort_ends_the_wait_for_a_lost_rank(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All later reductions end as well."""
    monkeypatch.setattr(all_reduce_file, "POLLS", 8)  # the interpreter takes a millisecond each
    buffers, memories = make_ranks(2, device)
    all_reduce(torch.ones(1024, device=device), memories[1], phases=SEND)  # rank 1 sends once, then is lost
    found = all_reduce(torch.ones(1024, device=device), memories[0])
    assert found.eq(2).all()
    timer = threading.Timer(0.2, memories[0].abort)
    timer.start()
    for _ in range(2):
        all_reduce(torch.ones(1024, device=device), memories[0])
        all_reduce_rms_norm(torch.ones(1, 1024, device=device), memories[0], Norm(torch.ones(1024, device=device), 1.0))
        all_reduce_max(torch.ones(3, dtype=torch.int64, device=device), memories[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert memories[0].abort_flag.item() == 1  # the wait had not ended before
    timer.join()
    assert len(buffers) == 2


@pytest.mark.parametrize("slices", [False, True], ids=["for-slices", "for-sums"])
def test_abort_ends_the_wait_of_two_shot(slices: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_file, "POLLS", 8)
    monkeypatch.setattr(all_reduce_file, "_TWO_SHOT_SAVES_BYTES", 0)
    buffers, memories = make_ranks(2, device)
    if slices:  # rank 1 sends the slice that rank 0 sums, then is lost
        all_reduce(torch.ones(1024, device=device), memories[1], phases=SEND)
    timer = threading.Timer(0.2, memories[0].abort)
    timer.start()
    all_reduce(torch.ones(1024, device=device), memories[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert memories[0].abort_flag.item() == 1  # the wait had not ended before
    timer.join()
    assert len(buffers) == 2


def test_detached_memory_never_waits(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce_file, "POLLS", 8)
    buffers, memories = make_ranks(2, device)
    alone = aborted_memory(memories[0])
    all_reduce(torch.ones(1024, device=device), alone)
    all_reduce_max(torch.ones(3, dtype=torch.int64, device=device), alone)
    assert not memories[0].steps.any()
    assert all(each.eq(symmetric_memory.EMPTY_BYTE).all() for each in buffers)


def test_can_all_reduce_checks_size_and_layout() -> None:
    assert can_all_reduce(torch.empty(64, 2048, dtype=torch.bfloat16))
    assert not can_all_reduce(torch.empty(12, dtype=torch.bfloat16))
    assert not can_all_reduce(torch.empty(8, 8).t()[:, :4])
    assert not can_all_reduce(torch.empty(all_reduce_file.MAX_BYTES // 4 + 1))


@pytest.mark.parametrize(
    ("rows", "size", "ranks", "expected"),
    [
        (256, 2048, 8, True),
        (257, 2048, 8, False),  # more than the buffer holds
        (128, 2560, 8, True),  # four chunks per row, one of them half empty
        (129, 2560, 8, False),
        (1, 5120, 8, False),  # more than a program can hold for 8 ranks
        (1, 5120, 4, True),
        (1, 16392, 2, False),
        (4, 1004, 2, False),  # rows are not aligned to 16 bytes
    ],
)
def test_can_fuse_norm_checks_what_a_program_can_hold(rows: int, size: int, ranks: int, expected: bool) -> None:
    assert can_fuse_norm(torch.empty(rows, size, dtype=torch.bfloat16), ranks) == expected


@pytest.mark.slow
def test_rank_processes_wait_for_each_other(tmp_path: Path) -> None:
    """Two processes map the same buffers and interpret the kernels, one-shot and two-shot: both send and receive in one
    launch. Five steps of each are one of every count."""
    for rank in range(2):
        (tmp_path / f"buffer-{rank}").write_bytes(bytes([symmetric_memory.EMPTY_BYTE]) * 4 * chunk_words(2))
    assert run_ranks("all_reduce_rank", tmp_path, 2, 5) == ("equal\n" * 2, "")
