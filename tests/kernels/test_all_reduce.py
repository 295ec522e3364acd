"""Sums over ranks through inboxes: all ranks in one process, which does each part of a launch for all in turn."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meltcore.kernels import all_reduce, inbox
from meltcore.kernels.all_reduce import (
    normalised_sum_of_shares,
    peer_largest,
    peer_sum,
    peer_sum_normalised,
    peer_sum_of_choices,
    suits_peers,
    suits_rows,
    sum_of_shares,
)
from meltcore.kernels.expert_sum import add_choices_torch
from meltcore.kernels.inbox import IN_TURNS, Peers, make_peers, nobody
from meltcore.kernels.norm import Norm

SENDS = IN_TURNS[0]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_ranks(ranks: int, device: torch.device) -> tuple[list[torch.Tensor], list[Peers]]:
    """Inboxes, which must live as long as their addresses, and each rank's view of them."""
    size = inbox.inbox_bytes(ranks)
    inboxes = [torch.full((size,), inbox.EMPTY_BYTE, dtype=torch.uint8, device=device) for _ in range(ranks)]
    addresses = [each.data_ptr() for each in inboxes]
    return inboxes, [make_peers(addresses, rank, device) for rank in range(ranks)]


def in_turns(launch: Callable[..., Any], peers: list[Peers], *tensors: list[Any]) -> list[Any]:
    """What each rank gets of a launch with its own of each of the tensors."""
    ranks = list(zip(peers, *tensors, strict=True))
    for parts in IN_TURNS[:-1]:
        for each, first, *rest in ranks:
            launch(first, each, *rest, parts=parts)
    return [launch(first, each, *rest, parts=IN_TURNS[-1]) for each, first, *rest in ranks]


@pytest.fixture(params=[1, 2], ids=["one shot", "two shots"])
def shots(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Two where a row can be cut into slices."""
    monkeypatch.setattr(all_reduce, "_WORTH_A_SECOND_WAY", 2**40 if request.param == 1 else 0)
    return int(request.param)


def assert_sum(found: torch.Tensor, expected: torch.Tensor) -> None:
    if expected.dtype == torch.float32:
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    else:  # the order of sums may turn a rounding, and no more
        torch.testing.assert_close(found.float(), expected.float(), rtol=2.0**-7, atol=1e-3)
        assert (found != expected).float().mean() < 0.02


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.usefixtures("shots")
def test_every_rank_gets_the_same_sum_step_after_step(ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """Messages of unlike sizes, so that grains have taken part in unlike numbers of steps."""
    torch.manual_seed(ranks)
    inboxes, peers = make_ranks(ranks, device)
    for count in (64, 1504, 8, 64):
        shares = [torch.randn(count).to(dtype) for _ in range(ranks)]
        residual = (3 * torch.randn(count)).to(dtype)
        for added in (residual, None):
            sent = [share.clone().to(device) for share in shares]
            outputs = [None if added is None else added.clone().to(device) for _ in range(ranks)]

            results = [result.cpu() for result in in_turns(peer_sum, peers, sent, outputs)]
            assert all(torch.equal(result, results[0]) for result in results)
            assert_sum(results[0], sum_of_shares(shares, added))
    assert len(inboxes) == ranks


@pytest.mark.usefixtures("shots")
def test_a_large_message_goes_through_fewer_programs(device: torch.device) -> None:
    """Of two grains each, of which the last is not full; then a small one through the same grains."""
    torch.manual_seed(1)
    inboxes, peers = make_ranks(2, device)
    for count in (300 * 512 + 88, 1504):
        shares = [torch.randn(count) for _ in range(2)]
        sent = [share.clone().to(device) for share in shares]
        for result in in_turns(peer_sum, peers, sent):
            assert_sum(result.cpu(), sum_of_shares(shares))
    assert len(inboxes) == 2


@pytest.mark.parametrize(
    ("ranks", "dtype", "weight_dtype"),
    [
        (2, torch.bfloat16, torch.bfloat16),
        (2, torch.bfloat16, torch.float32),
        (2, torch.float16, torch.float16),
        (4, torch.float32, torch.float32),
    ],
    ids=["2-bfloat16", "2-bfloat16 by float32", "2-float16", "4-float32"],
)
@pytest.mark.usefixtures("shots")
def test_a_sum_is_normalised_row_by_row(
    ranks: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: torch.device
) -> None:
    """Rows of one grain and of several, some of them not full, between sums that are cut otherwise."""
    torch.manual_seed(ranks)
    inboxes, peers = make_ranks(ranks, device)
    for rows, size in ((2, 64), (1, 2568), (2, 1024), (2, 2048), (1, 64)):
        weight = (torch.rand(size) + 0.5).to(weight_dtype)
        norm = Norm(weight.to(device), 1e-6)
        shares = [torch.randn(rows, size).to(dtype) for _ in range(ranks)]
        residual = (3 * torch.randn(rows, size)).to(dtype)
        for added in (residual, None):
            sent = [share.clone().to(device) for share in shares]
            outputs = [None if added is None else added.clone().to(device) for _ in range(ranks)]
            results = in_turns(peer_sum_normalised, peers, sent, [norm] * ranks, outputs)
            for rank, result in enumerate(results):
                assert result[0] is (sent[rank] if added is None else outputs[rank])
            assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0], strict=True))
            total, normalised = results[0]
            expected = normalised_sum_of_shares(shares, Norm(weight, 1e-6), added)
            assert_sum(total.cpu(), expected[0])
            assert_sum(normalised.cpu(), expected[1])
        plain = [torch.full((rows * size,), float(rank), device=device) for rank in range(ranks)]
        for result in in_turns(peer_sum, peers, plain):
            assert result.eq(ranks * (ranks - 1) / 2).all()
    assert len(inboxes) == ranks


@pytest.mark.parametrize(
    ("ranks", "dtype", "size"),
    [(2, torch.bfloat16, 1024), (4, torch.bfloat16, 2048), (2, torch.float16, 72), (2, torch.float32, 1544)],
    ids=["2-bfloat16", "4-bfloat16 of two grains", "2-float16 of part of one", "2-float32"],
)
@pytest.mark.usefixtures("shots")
def test_a_share_is_added_up_over_a_tokens_choices(
    ranks: int, dtype: torch.dtype, size: int, device: torch.device
) -> None:
    torch.manual_seed(size)
    inboxes, peers = make_ranks(ranks, device)
    weight = torch.rand(size) + 0.5
    norm = Norm(weight.to(device), 1e-6)
    for tokens, choices in ((3, 9), (1, 2)):
        outputs = [torch.randn(tokens * choices, size).to(dtype) for _ in range(ranks)]
        weights = torch.rand(tokens, choices)
        residual = (3 * torch.randn(tokens, size)).to(dtype)
        streams = [residual.clone().to(device) for _ in range(ranks)]
        given = [each.to(device) for each in outputs]
        results = in_turns(peer_sum_of_choices, peers, given, [weights.to(device)] * ranks, [norm] * ranks, streams)
        assert all(torch.equal(*pair) for result in results for pair in zip(result, results[0], strict=True))
        assert results[1][0] is streams[1]
        shares = [add_choices_torch(None, each, weights) for each in outputs]
        expected = normalised_sum_of_shares(shares, Norm(weight, 1e-6), residual)
        for found, right in zip(results[0], expected, strict=True):
            assert_sum(found.cpu(), right)
    assert len(inboxes) == ranks


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_largest_numbers_whatever_their_signs(ranks: int, device: torch.device) -> None:
    torch.manual_seed(0)
    inboxes, peers = make_ranks(ranks, device)
    for count in (1, 300):
        values = torch.randint(-(2**62), 2**62, (ranks, count))
        values[:, ::3] >>= 40  # upper halves of all ones and all zeros
        values[0, 0], values[1, 0] = -(2**63), -1
        sent = [row.clone().to(device) for row in values]
        for result in in_turns(peer_largest, peers, sent):
            assert torch.equal(result.cpu(), values.amax(0))
    assert len(inboxes) == ranks


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.usefixtures("shots")
def test_what_is_not_a_number_arrives_as_that_whatever_its_bits(dtype: torch.dtype, device: torch.device) -> None:
    """Of all ones too, as a place has that is empty: the rank that reads it must not wait for ever."""
    inboxes, peers = make_ranks(2, device)
    share = torch.ones(64, dtype=dtype, device=device)
    share[8:12] = torch.full((4,), -1, dtype=torch.int32 if dtype == torch.float32 else torch.int16).view(dtype)
    for result in in_turns(peer_sum, peers, [share, torch.ones_like(share)]):
        assert result[8:12].isnan().all()
        assert result[:8].eq(2).all()
        assert result[12:].eq(2).all()
    assert all(each.eq(inbox.EMPTY_BYTE).all() for each in inboxes)


@pytest.mark.usefixtures("shots")
def test_step_numbers_may_run_over(device: torch.device) -> None:
    inboxes, peers = make_ranks(2, device)
    for each in peers:
        each.steps.fill_(2**31 - 2)
    for _ in range(4):
        shares = [torch.randn(40, device=device) for _ in range(2)]
        expected = shares[0] + shares[1]
        for result in in_turns(peer_sum, peers, shares):
            assert torch.equal(result, expected)
    assert int(peers[0].steps[0]) == -(2**31) + 2
    assert len(inboxes) == 2


def test_a_wait_for_a_rank_that_is_gone_ends_when_the_host_says_so(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so do all sums behind it, without being told again."""
    monkeypatch.setattr(all_reduce, "LOOKS", 8)  # the interpreter takes a millisecond each
    inboxes, peers = make_ranks(2, device)
    peer_sum(torch.ones(1024, device=device), peers[1], parts=SENDS)  # rank 1 sends once, and is no more
    found = peer_sum(torch.ones(1024, device=device), peers[0])
    assert found.eq(2).all()
    telling = threading.Timer(0.2, peers[0].give_up)
    telling.start()
    for _ in range(2):
        peer_sum(torch.ones(1024, device=device), peers[0])
        peer_sum_normalised(torch.ones(1, 1024, device=device), peers[0], Norm(torch.ones(1024, device=device), 1.0))
        peer_largest(torch.ones(3, dtype=torch.int64, device=device), peers[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert peers[0].word.item() == 1  # it did not end before
    telling.join()
    assert len(inboxes) == 2


@pytest.mark.parametrize("slices", [False, True], ids=["for slices", "for sums"])
def test_a_wait_in_two_shots_ends_too(slices: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "LOOKS", 8)
    monkeypatch.setattr(all_reduce, "_WORTH_A_SECOND_WAY", 0)
    inboxes, peers = make_ranks(2, device)
    if slices:  # rank 1 sends those of its values that rank 0 adds up, and is no more
        peer_sum(torch.ones(1024, device=device), peers[1], parts=SENDS)
    telling = threading.Timer(0.2, peers[0].give_up)
    telling.start()
    peer_sum(torch.ones(1024, device=device), peers[0])
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert peers[0].word.item() == 1  # it did not end before
    telling.join()
    assert len(inboxes) == 2


def test_sums_among_nobody_wait_for_nobody(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_reduce, "LOOKS", 8)
    inboxes, peers = make_ranks(2, device)
    alone = nobody(peers[0])
    peer_sum(torch.ones(1024, device=device), alone)
    peer_largest(torch.ones(3, dtype=torch.int64, device=device), alone)
    assert not peers[0].steps.any()
    assert all(each.eq(inbox.EMPTY_BYTE).all() for each in inboxes)


def test_only_whole_words_of_bounded_size_are_sent_at_once() -> None:
    assert suits_peers(torch.empty(64, 2048, dtype=torch.bfloat16))
    assert not suits_peers(torch.empty(12, dtype=torch.bfloat16))
    assert not suits_peers(torch.empty(8, 8).t()[:, :4])
    assert not suits_peers(torch.empty(all_reduce.MOST_BYTES // 4 + 1))


@pytest.mark.parametrize(
    ("rows", "size", "ranks", "suits"),
    [
        (256, 2048, 8, True),
        (257, 2048, 8, False),  # more than can be on the way
        (128, 2560, 8, True),  # four grains a row, one of them half empty
        (129, 2560, 8, False),
        (1, 5120, 8, False),  # more than a program can hold, of so many ranks
        (1, 5120, 4, True),
        (1, 16392, 2, False),
        (4, 1004, 2, False),  # rows that do not begin at 16 bytes
    ],
)
def test_rows_that_a_program_can_hold_are_normalised_with_their_sum(
    rows: int, size: int, ranks: int, suits: bool
) -> None:
    assert suits_rows(torch.empty(rows, size, dtype=torch.bfloat16), ranks) == suits


@pytest.mark.parametrize("shots", [1, 2])
def test_ranks_that_are_processes_wait_for_each_other(shots: int, tmp_path: Path) -> None:
    """Two processes that map the same inboxes, kernels interpreted: both send and receive in the one launch."""
    for rank in range(2):
        (tmp_path / f"inbox-{rank}").write_bytes(bytes([inbox.EMPTY_BYTE]) * inbox.inbox_bytes(2))
    command = [sys.executable, str(Path(__file__).parent / "all_reduce_rank.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", "8", str(shots)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    try:
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["equal\n", "equal\n"]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
