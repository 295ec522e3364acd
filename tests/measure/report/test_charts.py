from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.measure.report.page.charts import Scale, linear_ticks, log_ticks, spaced_indices


@given(st.floats(1e-6, 1e12))
def test_linear_ticks_enclose_the_data_with_few_round_steps(high: float) -> None:
    ticks = linear_ticks(high)
    assert ticks[0] == 0
    assert ticks[-1] >= high * (1 - 1e-6)
    assert 2 <= len(ticks) <= 7


@given(st.floats(1e-3, 1e9), st.floats(1, 1e6))
def test_log_ticks_enclose_the_data(low: float, factor: float) -> None:
    ticks = log_ticks(low, low * factor)
    assert ticks == sorted(set(ticks))
    assert 2 <= len(ticks) <= 20
    assert ticks[0] <= low * (1 + 1e-6)
    assert ticks[-1] >= low * factor * (1 - 1e-6)


def test_logarithmic_scale_puts_decades_at_equal_steps() -> None:
    scale = Scale(10, 1000, 0, 100, log=True)
    assert (scale(10), scale(100), scale(1000)) == pytest.approx((0, 50, 100))


def test_one_value_alone_stands_in_the_middle() -> None:
    assert Scale(5, 5, 0, 100, log=True)(5) == 50


@given(st.lists(st.floats(0, 500), min_size=1, max_size=30, unique=True), st.floats(1, 100))
def test_labels_that_are_kept_do_not_overlap(positions: list[float], gap: float) -> None:
    positions = sorted(positions)
    kept = spaced_indices(positions, gap)
    assert kept[-1] == len(positions) - 1
    assert all(positions[b] - positions[a] >= gap for a, b in pairwise(kept))
