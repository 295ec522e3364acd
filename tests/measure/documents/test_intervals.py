import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.measure.documents.values.intervals import wilson_interval


@pytest.mark.parametrize(
    ("successes", "total", "low", "high"),
    [(199, 200, 0.9722, 0.9991), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634)],
)
def test_wilson_matches_published_values(successes: int, total: int, low: float, high: float) -> None:
    assert wilson_interval(successes, total) == pytest.approx((low, high), abs=2e-4)


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_contains_the_ratio_and_stays_in_range(successes: int, total: int) -> None:
    successes = min(successes, total)
    low, high = wilson_interval(successes, total)
    assert 0 <= low <= successes / total + 1e-12
    assert successes / total - 1e-12 <= high <= 1


def test_nothing_asked_says_nothing() -> None:
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_more_successes_than_total_are_rejected() -> None:
    with pytest.raises(ValueError, match="from 0 to the total"):
        wilson_interval(3, 2)
