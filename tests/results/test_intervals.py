import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.results.intervals import wilson


@pytest.mark.parametrize(
    ("right", "asked", "low", "high"),
    [(199, 200, 0.9722, 0.9991), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (5, 10, 0.2366, 0.7634)],
)
def test_wilson_matches_published_values(right: int, asked: int, low: float, high: float) -> None:
    assert wilson(right, asked) == pytest.approx((low, high), abs=2e-4)


@given(st.integers(0, 500), st.integers(1, 500))
def test_wilson_holds_the_share_and_stays_in_range(right: int, asked: int) -> None:
    right = min(right, asked)
    low, high = wilson(right, asked)
    assert 0 <= low <= right / asked + 1e-12
    assert right / asked - 1e-12 <= high <= 1


def test_nothing_asked_says_nothing() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


def test_more_right_than_asked_is_refused() -> None:
    with pytest.raises(ValueError, match="no share"):
        wilson(3, 2)
