"""Peak, steady window and timeline from send and end times."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.measure.load.run.timeline import InFlight, TokenTimes, timeline

intervals = st.lists(st.tuples(st.integers(0, 100), st.integers(1, 50)), min_size=1, max_size=40)


def in_flight(*spans: tuple[float, float]) -> InFlight:
    return InFlight(np.array([low for low, _ in spans], float), np.array([high for _, high in spans], float))


@given(intervals)
def test_peak_and_counts_agree_with_counting_one_by_one(drawn: list[tuple[int, int]]) -> None:
    spans = [(low, low + length) for low, length in drawn]
    counted = [sum(low <= moment < high for low, high in spans) for moment in range(151)]
    flight = in_flight(*spans)
    assert flight.peak == max(counted)
    assert flight.counts_at(np.arange(151.0)).tolist() == counted


def test_back_to_back_requests_are_not_concurrent() -> None:
    assert in_flight((0, 1), (1, 2)).peak == 1


def test_steady_window_is_the_longest_at_90_percent() -> None:
    # 10 in flight; one leaves at 5 (9 are still 90 %), a second at 8.
    spans = [(0.0, 20.0)] * 8 + [(0.0, 5.0), (0.0, 8.0)]
    assert in_flight(*spans).steady_window(10) == (0.0, 8.0)


def test_steady_window_bridges_a_step_but_not_a_gap() -> None:
    assert in_flight((0, 2), (2.005, 4)).steady_window(1) == (0.0, 4.0)
    assert in_flight((0, 2), (2.5, 5)).steady_window(1) == (2.5, 5.0)


def test_no_steady_window_below_the_level_or_below_a_second() -> None:
    assert in_flight((0, 10)).steady_window(2) is None
    assert in_flight((0, 0.9)).steady_window(1) is None
    assert in_flight().steady_window(1) is None


def test_timeline_counts_every_token_and_its_last_bucket_is_long_enough() -> None:
    times = np.array([0.5, 1.5, 2.1, 2.2])
    points = timeline(in_flight((0, 2.2)), TokenTimes(times, np.array([1.0, 2.0, 3.0, 4.0])), 0.0, 2.2)
    assert [point.t_s for point in points] == [0.0, 1.0]
    widths = [1.0, 1.2]
    assert sum(p.output_tokens_per_s * width for p, width in zip(points, widths, strict=True)) == pytest.approx(10.0)
    assert [point.in_flight for point in points] == [1, 1]
