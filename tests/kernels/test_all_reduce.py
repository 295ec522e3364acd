"""Sums over ranks through inboxes: all ranks in one process, which sends for each and then receives for each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meltcore.kernels import all_reduce
from meltcore.kernels.all_reduce import Peers, one_shot_largest, one_shot_sum, suits_one_shot, sum_of_shares

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def make_ranks(ranks: int, device: torch.device) -> tuple[list[torch.Tensor], list[Peers]]:
    """Inboxes, which must live as long as their addresses, and each rank's view of them."""
    inboxes = [torch.zeros(all_reduce.inbox_bytes(ranks) // 8, dtype=torch.int64, device=device) for _ in range(ranks)]
    addresses = torch.tensor([inbox.data_ptr() for inbox in inboxes], device=device)
    return inboxes, [Peers(addresses, all_reduce.new_steps(device), rank) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_same_sum_step_after_step(ranks: int, dtype: torch.dtype, device: torch.device) -> None:
    """Messages of unlike sizes, so that programs have taken part in unlike numbers of steps."""
    torch.manual_seed(ranks)
    inboxes, peers = make_ranks(ranks, device)
    for count in (64, 1504, 8, 64):
        shares = [torch.randn(count).to(dtype) for _ in range(ranks)]
        residual = (3 * torch.randn(count)).to(dtype)
        for added in (residual, None):
            sent = [share.clone().to(device) for share in shares]
            outputs = [None if added is None else added.clone().to(device) for _ in range(ranks)]
            for rank in range(ranks):
                one_shot_sum(sent[rank], peers[rank], outputs[rank], receives=False)
            results = [one_shot_sum(sent[rank], peers[rank], outputs[rank], sends=False).cpu() for rank in range(ranks)]
            assert all(torch.equal(result, results[0]) for result in results)
            expected = sum_of_shares(shares, added)
            if dtype == torch.float32:
                torch.testing.assert_close(results[0], expected, rtol=1e-6, atol=1e-6)
            else:  # the order of sums may turn a rounding, and no more
                torch.testing.assert_close(results[0].float(), expected.float(), rtol=2.0**-7, atol=1e-3)
                assert (results[0] != expected).float().mean() < 0.02
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
        for rank in range(ranks):
            one_shot_largest(sent[rank], peers[rank], receives=False)
        for rank in range(ranks):
            assert torch.equal(one_shot_largest(sent[rank], peers[rank], sends=False).cpu(), values.amax(0))
    assert len(inboxes) == ranks


def test_step_numbers_may_run_over(device: torch.device) -> None:
    inboxes, peers = make_ranks(2, device)
    for each in peers:
        each.steps.fill_(2**31 - 2)
    for _ in range(4):
        shares = [torch.randn(40, device=device) for _ in range(2)]
        expected = shares[0] + shares[1]
        for rank in range(2):
            one_shot_sum(shares[rank], peers[rank], receives=False)
        for rank in range(2):
            assert torch.equal(one_shot_sum(shares[rank], peers[rank], sends=False), expected)
    assert int(peers[0].steps[0]) == -(2**31) + 2
    assert len(inboxes) == 2


def test_only_whole_words_of_bounded_size_are_sent_at_once() -> None:
    assert suits_one_shot(torch.empty(64, 2048, dtype=torch.bfloat16))
    assert not suits_one_shot(torch.empty(12, dtype=torch.bfloat16))
    assert not suits_one_shot(torch.empty(8, 8).t()[:, :4])
    assert not suits_one_shot(torch.empty(all_reduce.MOST_BYTES // 4 + 1))


def test_ranks_that_are_processes_wait_for_each_other(tmp_path: Path) -> None:
    """Two processes that map the same inboxes, kernels interpreted: both send and receive in the one launch."""
    for rank in range(2):
        (tmp_path / f"inbox-{rank}").write_bytes(bytes(all_reduce.inbox_bytes(2)))
    command = [sys.executable, str(Path(__file__).parent / "all_reduce_rank.py"), str(tmp_path)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), "2", "24"],
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
