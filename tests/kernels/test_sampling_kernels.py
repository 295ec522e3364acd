"""Argmax and sampling: kernels and references against plain definitions."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_tools import in_reference, in_triton

from meltcore.kernels.sampling import draw
from meltcore.kernels.sampling.argmax import argmax
from meltcore.kernels.sampling.draw import gumbel_noise, gumbel_sample, gumbel_sample_shard
from meltcore.kernels.sampling.top_k_top_p import KEEP_ALL


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 9000), (3, 4096), (5, 517), (2, 4097), (1, 1), (0, 64)])
def test_argmax_takes_the_first_of_the_largest(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Logits drawn from few values, so that the largest occurs often."""
    torch.manual_seed(rows * vocab)
    logits = torch.randint(-3, 3, (rows, vocab)).to(dtype)
    expected = torch.tensor([row.index(max(row)) for row in logits.tolist()], dtype=torch.int64)
    assert torch.equal(argmax(logits), expected)
    assert torch.equal(in_triton(argmax)(logits.to(device)).cpu(), expected)


@pytest.mark.parametrize(
    "values_at",
    [
        {0: float("nan"), 9: float("nan")},
        {5000: float("nan"), 8999: float("nan"), 3: float("inf")},
        {4096: float("inf"), 4097: float("inf")},
        {7000: 20.0, 7001: -20.0},
    ],
)
def test_argmax_treats_nan_and_infinity_as_torch_does(values_at: dict[int, float], device: torch.device) -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 9000)
    for token, value in values_at.items():
        logits[1, token] = value
    result = in_triton(argmax)(logits.to(device)).cpu()
    assert result.tolist() == logits.argmax(-1).tolist()
    assert result[1] == next(iter(values_at))


def test_argmax_of_extreme_rows_is_inside_the_vocabulary(device: torch.device) -> None:
    """Nothing allowed, zeros of both signs, and a row that ends where another array might begin."""
    logits = torch.full((3, 6000), float("-inf"))
    logits[1] = -0.0
    logits[1, 4500:] = 0.0
    logits[2, 5999] = torch.finfo(torch.float32).min
    strided = torch.full((3, 7000), float("inf"))
    strided[:, :6000] = logits
    result = in_triton(argmax)(strided.to(device)[:, :6000]).cpu()
    assert result.tolist() == logits.argmax(-1).tolist() == [0, 0, 5999]


def test_argmax_refuses_strided_rows(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        in_triton(argmax)(torch.zeros(8, 4, device=device).T)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    seeds, positions = torch.tensor([1, 1, 2, -5]), torch.tensor([7, 8, 7, 7])
    together = gumbel_noise(seeds, positions, 1000)
    for row in range(4):
        alone = gumbel_noise(seeds[row : row + 1], positions[row : row + 1], 1000)
        assert torch.equal(alone[0], together[row])
    for first in range(4):
        for second in range(first):
            assert not torch.equal(together[first], together[second])


def test_noise_has_the_gumbel_distribution() -> None:
    noise = gumbel_noise(torch.arange(200), torch.full((200,), 3), 2000).flatten().double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.02
    for probability in (0.01, 0.5, 0.99):
        expected = -math.log(-math.log(probability))
        assert abs(float((noise < expected).double().mean()) - probability) < 0.002


def test_samples_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = 40_000
    noise = gumbel_noise(torch.full((draws,), 11), torch.arange(draws), 4)
    counts = torch.bincount((logits + noise).argmax(-1), minlength=4) / draws
    assert (counts - logits.softmax(-1)).abs().max() < 0.01


def test_largest_noise_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of all ones and all zeros: infinite noise would draw a token whatever its logit."""
    for bits, expected in ((-1, 16.6), (0, -2.8)):
        monkeypatch.setattr(draw, "mix_int64", lambda state, bits=bits: torch.full_like(state, bits))
        noise = gumbel_noise(torch.tensor([1]), torch.tensor([1]), 4)
        assert noise[0].tolist() == pytest.approx([expected] * 4, abs=0.1)


def random_draws(rows: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Logits and settings; every third row is greedy, seeds and positions have many bits."""
    torch.manual_seed(vocab)
    logits = (torch.randn(rows, vocab) * 3).to(dtype)
    temperatures = torch.tensor([(0.0, 0.7, 1.5)[row % 3] for row in range(rows)])
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,))
    return logits, temperatures, seeds, torch.randint(0, 2**20, (rows,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 2500), (3, 1024), (6, 517), (9, 1025), (0, 64)])
def test_implementations_sample_the_same_tokens(
    rows: int, vocab: int, dtype: torch.dtype, device: torch.device
) -> None:
    case = random_draws(rows, vocab, dtype)
    thresholds = torch.randint(0, vocab, (rows,))
    thresholds[1::3] = KEEP_ALL
    for last in (None, thresholds):
        expected = gumbel_sample(*case, last)
        on_device = [None if part is None else part.to(device) for part in (*case, last)]
        assert torch.equal(in_triton(gumbel_sample)(*on_device).cpu(), expected)
        greedy_rows = case[1] == 0
        assert torch.equal(expected[greedy_rows], case[0][greedy_rows].argmax(-1))


def same_row(row: torch.Tensor, draws: int, last: int) -> tuple[torch.Tensor, ...]:
    """One row, drawn from at `draws` positions."""
    temperatures, seeds = torch.full((draws,), 2.0), torch.full((draws,), 3)
    return row.repeat(draws, 1), temperatures, seeds, torch.arange(draws), torch.full((draws,), last)


def test_no_token_after_the_threshold_is_sampled(device: torch.device) -> None:
    """Falling logits, and among equals rising ids: 3, 1, 4, 0, 2."""
    row = torch.tensor([1.0, 2.0, 0.0, 3.0, 2.0])
    for last, allowed in ((3, {3}), (1, {3, 1}), (4, {3, 1, 4}), (2, {0, 1, 2, 3, 4}), (KEEP_ALL, {0, 1, 2, 3, 4})):
        tokens = gumbel_sample(*same_row(row, 300, last))
        assert set(tokens.tolist()) == allowed
        some = in_triton(gumbel_sample)(*(part.to(device) for part in same_row(row, 12, last)))
        assert torch.equal(some.cpu(), tokens[:12])


def test_masked_token_is_never_sampled(device: torch.device) -> None:
    row = torch.full((900,), float("-inf"))
    row[700] = -1e30
    assert set(gumbel_sample(*same_row(row, 200, KEEP_ALL)).tolist()) == {700}
    some = in_triton(gumbel_sample)(*(part.to(device) for part in same_row(row, 8, KEEP_ALL)))
    assert set(some.tolist()) == {700}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_implementations_sample_the_same_tokens_from_a_full_vocabulary(dtype: torch.dtype) -> None:
    """Except where the two best scores differ by no more than the logarithms round."""
    case = [part.cuda() for part in random_draws(300, 151936, dtype)]
    expected, sampled = in_reference(gumbel_sample)(*case), in_triton(gumbel_sample)(*case)
    assert (expected != sampled).sum() <= 1


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_best_of_all_shards_is_the_sample_of_the_whole_vocabulary(shards: int, device: torch.device) -> None:
    """As ranks do that have a shard of the vocabulary each; scores have the noise of their ids."""
    logits, *settings = random_draws(6, 1000, torch.float32)
    expected = gumbel_sample(logits, *settings)
    for sample, where_device in ((gumbel_sample_shard, torch.device("cpu")), (in_triton(gumbel_sample_shard), device)):
        winners, scores = [], []
        for first in range(0, 1000, 1000 // shards):
            shard = logits[:, first : first + 1000 // shards].contiguous().to(where_device)
            token, score = sample(shard, *(each.to(where_device) for each in settings), first)
            winners.append(token.cpu() + first)
            scores.append(score.cpu())
        best = torch.stack(scores).argmax(0, keepdim=True)
        assert torch.equal(torch.stack(winners).gather(0, best)[0], expected)
