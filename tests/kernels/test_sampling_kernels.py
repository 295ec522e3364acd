"""Choosing a token, greedily or by a draw: both bodies against plain definitions."""

from __future__ import annotations

import math

import pytest
import torch

from meltcore.kernels import sampling
from meltcore.kernels.likeliest import KEEP_ALL
from meltcore.kernels.sampling import gumbel_noise


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 9000), (3, 4096), (5, 517), (2, 4097), (1, 1), (0, 64)])
def test_greedy_takes_the_first_of_the_largest(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Logits drawn from few values, so that the largest stands in many places."""
    torch.manual_seed(rows * vocab)
    logits = torch.randint(-3, 3, (rows, vocab)).to(dtype)
    expected = torch.tensor([row.index(max(row)) for row in logits.tolist()], dtype=torch.int64)
    assert torch.equal(sampling._greedy_torch(logits), expected)
    assert torch.equal(sampling._greedy_triton(logits.to(device)).cpu(), expected)


@pytest.mark.parametrize(
    "placed",
    [
        {0: float("nan"), 9: float("nan")},
        {5000: float("nan"), 8999: float("nan"), 3: float("inf")},
        {4096: float("inf"), 4097: float("inf")},
        {7000: 20.0, 7001: -20.0},
    ],
)
def test_greedy_sees_a_single_logit_as_torch_does(placed: dict[int, float], device: torch.device) -> None:
    torch.manual_seed(1)
    logits = torch.randn(2, 9000)
    for token, value in placed.items():
        logits[1, token] = value
    result = sampling._greedy_triton(logits.to(device)).cpu()
    assert result.tolist() == logits.argmax(-1).tolist()
    assert result[1] == next(iter(placed))


def test_greedy_of_extreme_rows_stays_inside_the_vocabulary(device: torch.device) -> None:
    """Nothing allowed, zeros of both signs, and a row that ends where another array might begin."""
    logits = torch.full((3, 6000), float("-inf"))
    logits[1] = -0.0
    logits[1, 4500:] = 0.0
    logits[2, 5999] = torch.finfo(torch.float32).min
    strided = torch.full((3, 7000), float("inf"))
    strided[:, :6000] = logits
    result = sampling._greedy_triton(strided.to(device)[:, :6000]).cpu()
    assert result.tolist() == logits.argmax(-1).tolist() == [0, 0, 5999]


def test_greedy_refuses_logits_whose_rows_are_scattered(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        sampling._greedy_triton(torch.zeros(8, 4, device=device).T)


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


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0])
    draws = 40_000
    noise = gumbel_noise(torch.full((draws,), 11), torch.arange(draws), 4)
    counts = torch.bincount((logits + noise).argmax(-1), minlength=4) / draws
    assert (counts - logits.softmax(-1)).abs().max() < 0.01


def test_the_largest_noise_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of all ones and all zeros: infinite noise would draw a token whatever its logit."""
    for bits, expected in ((-1, 16.6), (0, -2.8)):
        monkeypatch.setattr(sampling, "_mix", lambda state, bits=bits: torch.full_like(state, bits))
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
def test_both_bodies_draw_the_same_tokens(rows: int, vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    case = random_draws(rows, vocab, dtype)
    last_kept = torch.randint(0, vocab, (rows,))
    last_kept[1::3] = KEEP_ALL
    for last in (None, last_kept):
        expected = sampling._draw_torch(*case, last, 0)[0]
        on_device = [None if part is None else part.to(device) for part in (*case, last)]
        assert torch.equal(sampling._draw_triton(*on_device, 0)[0].cpu(), expected)
        greedy_rows = case[1] == 0
        assert torch.equal(expected[greedy_rows], case[0][greedy_rows].argmax(-1))


def same_row(row: torch.Tensor, draws: int, last: int) -> tuple[torch.Tensor, ...]:
    """One row, drawn from at `draws` positions."""
    heats, seeds = torch.full((draws,), 2.0), torch.full((draws,), 3)
    return row.repeat(draws, 1), heats, seeds, torch.arange(draws), torch.full((draws,), last)


def test_a_draw_keeps_to_what_comes_up_to_the_last_token(device: torch.device) -> None:
    """Falling logits, and among equals rising ids: 3, 1, 4, 0, 2."""
    row = torch.tensor([1.0, 2.0, 0.0, 3.0, 2.0])
    for last, allowed in ((3, {3}), (1, {3, 1}), (4, {3, 1, 4}), (2, {0, 1, 2, 3, 4}), (KEEP_ALL, {0, 1, 2, 3, 4})):
        tokens = sampling._draw_torch(*same_row(row, 300, last), 0)[0]
        assert set(tokens.tolist()) == allowed
        some = sampling._draw_triton(*(part.to(device) for part in same_row(row, 12, last)), 0)[0]
        assert torch.equal(some.cpu(), tokens[:12])


def test_a_forbidden_token_is_never_drawn(device: torch.device) -> None:
    row = torch.full((900,), float("-inf"))
    row[700] = -1e30
    assert set(sampling._draw_torch(*same_row(row, 200, KEEP_ALL), 0)[0].tolist()) == {700}
    some = sampling._draw_triton(*(part.to(device) for part in same_row(row, 8, KEEP_ALL)), 0)[0]
    assert set(some.tolist()) == {700}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_both_bodies_draw_the_same_tokens_from_a_whole_vocabulary(dtype: torch.dtype) -> None:
    """Except where the two best scores differ by no more than the logarithms round."""
    case = [part.cuda() for part in random_draws(300, 151936, dtype)]
    expected, drawn = sampling._draw_torch(*case, None, 0)[0], sampling._draw_triton(*case, None, 0)[0]
    assert (expected != drawn).sum() <= 1


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_the_best_of_all_parts_is_drawn_from_the_whole(parts: int, device: torch.device) -> None:
    """What ranks do that hold a part of the vocabulary each; scores with the noise of the ids they stand for."""
    logits, *settings = random_draws(6, 1000, torch.float32)
    expected = sampling.draw(logits, *settings)
    for body, place in ((sampling._draw_torch, torch.device("cpu")), (sampling._draw_triton, device)):
        winners, scores = [], []
        for first in range(0, 1000, 1000 // parts):
            part = logits[:, first : first + 1000 // parts].contiguous().to(place)
            token, score = body(part, *(each.to(place) for each in settings), None, first)
            winners.append(token.cpu() + first)
            scores.append(score.cpu())
        best = torch.stack(scores).argmax(0, keepdim=True)
        assert torch.equal(torch.stack(winners).gather(0, best)[0], expected)
