"""The sampling kernels against plain definitions, on random inputs."""

from __future__ import annotations

import math

import pytest
import torch

from meltcore.kernels import sampling
from meltcore.kernels.sampling import gumbel_noise, keep_likeliest, penalise


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


def kept(logits: torch.Tensor, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> set[int]:
    result = keep_likeliest(logits[None], torch.tensor([top_k]), torch.tensor([top_p]), torch.tensor([min_p]))[0]
    finite = result.isfinite()
    assert torch.equal(result[finite], logits[finite])
    return set(finite.nonzero()[:, 0].tolist())


@pytest.mark.parametrize("seed", range(20))
def test_filters_keep_what_their_definitions_keep(seed: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(50) * 3
    probabilities = logits.softmax(-1)
    order = probabilities.argsort(descending=True).tolist()

    assert kept(logits, top_k=7) == set(order[:7])

    nucleus, mass = set(), 0.0
    for token in order:
        if mass >= 0.8:
            break
        nucleus.add(token)
        mass += float(probabilities[token])
    assert kept(logits, top_p=0.8) == nucleus

    threshold = 0.1 * float(probabilities.max())
    assert kept(logits, min_p=0.1) == {token for token in range(50) if probabilities[token] >= threshold}


def test_filters_apply_one_after_the_other() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Top-k leaves 0.4 and 0.3, which become 0.57 and 0.43: the first alone has the nucleus of 0.5.
    assert kept(logits, top_k=2, top_p=0.5) == {0}
    assert kept(logits, top_p=0.5) == {0, 1}


def test_everything_off_keeps_everything_and_the_likeliest_always_stays() -> None:
    logits = torch.randn(30)
    assert kept(logits) == set(range(30))
    assert kept(logits, top_p=1e-9) == {int(logits.argmax())}
    assert kept(logits, min_p=1.0) == {int(logits.argmax())}
    assert kept(logits, top_k=1000) == set(range(30))


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


def test_penalties_follow_their_definitions() -> None:
    torch.manual_seed(0)
    logits = torch.randn(3, 6)
    counts = torch.tensor([[0, 1, 3, 0, 0, 0]] * 3, dtype=torch.int32)
    in_prompt = torch.tensor([[False, False, True, True, False, False]] * 3)
    presence, frequency, repetition = [0.5, 0.0, 0.0], [0.0, 0.25, 0.0], [1.0, 1.0, 1.5]
    result = penalise(
        logits, counts, in_prompt, torch.tensor(presence), torch.tensor(frequency), torch.tensor(repetition)
    )
    for row in range(3):
        for token in range(6):
            expected = float(logits[row, token])
            if counts[row, token] > 0 or in_prompt[row, token]:
                expected = expected / repetition[row] if expected > 0 else expected * repetition[row]
            expected -= frequency[row] * int(counts[row, token]) + presence[row] * (int(counts[row, token]) > 0)
            assert float(result[row, token]) == pytest.approx(expected, abs=1e-6)
