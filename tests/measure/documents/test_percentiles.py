"""The sample-size rule, checked from first principles, and the summary of samples."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meltcore.measure.documents.schema import Distribution
from meltcore.measure.documents.values.percentiles import QUANTILES, SAMPLES_NEEDED, distribution


@pytest.mark.parametrize("name", SAMPLES_NEEDED)
def test_samples_needed_are_the_smallest_that_give_99_percent_confidence(name: str) -> None:
    share = QUANTILES[name]

    def at_most_one_above(n: int) -> float:
        return math.pow(share, n) + n * (1 - share) * math.pow(share, n - 1)

    needed = SAMPLES_NEEDED[name]
    assert at_most_one_above(needed) <= 0.01 < at_most_one_above(needed - 1)


@pytest.mark.parametrize("name", SAMPLES_NEEDED)
def test_percentile_appears_exactly_when_the_sample_carries_it(name: str) -> None:
    needed = SAMPLES_NEEDED[name]
    assert getattr(distribution(range(needed - 1)), name) is None
    assert getattr(distribution(range(needed)), name) is not None


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=400))
def test_distribution_is_ordered_and_within_its_samples(samples: list[float]) -> None:
    found = distribution(samples)
    stated = [value for value in (found.p50, found.p90, found.p95, found.p99) if value is not None]
    assert found.n == len(samples)
    assert (found.min, found.max) == (min(samples), max(samples))
    assert stated == sorted(stated)
    assert all(min(samples) <= value <= max(samples) for value in stated)


def test_percentiles_of_a_known_sample() -> None:
    found = distribution(np.arange(1001.0))
    assert (found.p50, found.p90, found.p99, found.p999) == (500.0, 900.0, 990.0, None)


def test_no_samples_are_no_numbers() -> None:
    assert distribution([]) == Distribution()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_sample_that_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="not finite"):
        distribution([1.0, bad])
