"""Top-k, top-p and min-p: both implementations against plain definitions, on random rows and on edge cases."""

from __future__ import annotations

import math

import pytest
import torch
from kernel_tools import in_reference, in_triton

from meltcore.kernels.sampling.top_k_top_p import KEEP_ALL, threshold_tokens

OFF = (0, 1.0, 0.0)


def thresholds(
    logits: torch.Tensor, settings: list[tuple[int, float, float]], device: torch.device, temperature: float = 1.0
) -> list[int]:
    """settings: top_k, top_p and min_p of each row."""
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*settings, strict=True))
    temperatures = torch.full((len(settings),), temperature)
    given = (logits, temperatures, top_k, top_p.float(), min_p.float())
    return threshold_tokens(*(tensor.to(device) for tensor in given)).cpu().tolist()


def in_order(row: torch.Tensor) -> list[int]:
    """Token ids by falling logit, and among equals by rising id."""
    values = row.tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))


def expected_last(row: torch.Tensor, top_k: int, top_p: float, min_p: float, temperature: float = 1.0) -> int:
    order = in_order(row)
    if top_k:
        order = order[:top_k]
    weights = [math.exp((float(row[token]) - float(row[order[0]])) / temperature) for token in order]
    whole, mass, kept = math.fsum(weights), 0.0, []
    for token, weight in zip(order, weights, strict=True):
        if (top_p < 1 and mass >= top_p * whole) or weight < min_p:
            break
        kept.append(token)
        mass += weight
    return kept[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_filters_keep_what_their_definitions_keep(dtype: torch.dtype, device: torch.device) -> None:
    """bfloat16 rows are full of equal logits."""
    torch.manual_seed(3)
    settings = [(7, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.1), (50, 0.9, 0.01), (1, 0.3, 0.0), (900, 0.999, 0.0)]
    logits = (torch.randn(len(settings), 900) * 3 - 2).to(dtype)
    expected = [expected_last(row, *each, temperature=0.8) for row, each in zip(logits, settings, strict=True)]
    assert thresholds(logits, settings, device, temperature=0.8) == expected


@pytest.mark.usefixtures("implementation")
def test_filters_apply_one_after_the_other(device: torch.device) -> None:
    """Top-k leaves 0.4 and 0.3, which become 0.57 and 0.43: the first alone has the nucleus of 0.5."""
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().repeat(2, 1)
    assert thresholds(logits, [(2, 0.5, 0.0), (0, 0.5, 0.0)], device) == [0, 1]


@pytest.mark.usefixtures("implementation")
def test_filters_that_are_off_keep_all_and_the_argmax_is_always_kept(device: torch.device) -> None:
    torch.manual_seed(0)
    logits = torch.randn(4, 30)
    settings = [OFF, (0, 1e-9, 0.0), (0, 1.0, 1.0), (1000, 1.0, 0.0)]
    best, lowest = logits.argmax(-1).tolist(), int(logits[3].argmin())
    assert thresholds(logits, settings, device) == [KEEP_ALL, best[1], best[2], lowest]


@pytest.mark.usefixtures("implementation")
def test_of_equal_logits_the_lowest_ids_are_kept(device: torch.device) -> None:
    """10,000 equal logits: more than a tile, so that the count goes on over tiles."""
    logits = torch.zeros(5, 10_000, dtype=torch.bfloat16)
    logits[:, 9_000] = 1.0
    settings = [(1, 1.0, 0.0), (2, 1.0, 0.0), (9_500, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 0.3)]
    # The one counts e times as much as each of the others: half of all is it and 4,998 more.
    assert thresholds(logits, settings, device)[:3] == [9_000, 0, 9_499]
    nucleus, everything = thresholds(logits, settings, device)[3:]
    assert abs(nucleus - 4_998) <= 2  # float32 sums of equal probabilities
    assert everything == 9_999


@pytest.mark.usefixtures("implementation")
def test_signs_zeros_and_masked_tokens(device: torch.device) -> None:
    inf = float("inf")
    rows = [
        [-inf, -3.0, -inf, -1.0, -2.0, -inf],  # more asked for than allowed: a forbidden one is last, or none
        [-0.0, 0.0, -1.0, 0.0, -0.0, -5.0],
        [-1e30, 1e30, -1e30, -1e-30, 1e-30, 0.0],
        [-7.0, -7.0, -7.0, -7.0, -7.0, -7.0],
    ]
    settings = [(2, 1.0, 0.0), (4, 1.0, 0.0), (4, 1.0, 0.0), (3, 1.0, 0.0)]
    assert thresholds(torch.tensor(rows), settings, device) == [4, 4, 3, 2]
    settings = [(0, 0.9999, 0.0), (0, 0.5, 0.0), (0, 0.5, 0.0), (0, 0.4, 0.0)]
    assert thresholds(torch.tensor(rows), settings, device) == [1, 3, 1, 2]


@pytest.mark.usefixtures("implementation")
def test_neighboring_numbers_and_a_single_token(device: torch.device) -> None:
    """Logits that differ in their last bit alone need every pass; one token needs none."""
    row = torch.arange(40, dtype=torch.int32).add(0x40490FDB).view(torch.float32)
    logits = torch.stack([row, -row])
    assert thresholds(logits, [(3, 1.0, 0.0), (5, 1.0, 0.0)], device) == [37, 4]
    assert thresholds(logits, [(0, 0.51, 0.0), (0, 0.26, 0.0)], device) == [19, 10]
    assert thresholds(torch.tensor([[-7.5]]), [(3, 0.5, 0.1)], device) == [0]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def test_implementations_agree_on_a_full_vocabulary(dtype: torch.dtype) -> None:
    """Counts exactly; probabilities up to the rounding of their sums, on which the boundary token depends."""
    torch.manual_seed(0)
    rows, device = 64, torch.device("cuda")
    logits = (torch.randn(rows, 151936, device=device) * 2).to(dtype)
    exact = [((1, 20, 1000, 100_000)[row % 4], 1.0, 0.0) for row in range(rows)]
    assert in_triton(thresholds)(logits, exact, device) == in_reference(thresholds)(logits, exact, device)
    rounded = [((0, 5000)[row % 2], (0.3, 0.9, 0.99)[row % 3], (0.0, 1e-4)[row % 2]) for row in range(rows)]
    found = torch.tensor(in_triton(thresholds)(logits, rounded, device), device=device)[:, None]
    expected = torch.tensor(in_reference(thresholds)(logits, rounded, device), device=device)[:, None]
    probabilities = logits.float().softmax(-1)
    mass = [probabilities.masked_fill(logits < logits.gather(1, last), 0.0).sum(-1) for last in (found, expected)]
    torch.testing.assert_close(mass[0], mass[1], rtol=0, atol=2e-4)
