"""The statistics shown right by simulation: sets of starts whose true change and noise are known."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from meltcore.measure.documents.comparison import Better, ComparedMetric, Limits
from meltcore.measure.report.comparisons.compare_starts import noise_level, verdict
from meltcore.measure.report.comparisons.statistics import Change, compare_samples, noise_floor

STARTS = 6
RESAMPLES = 999


def judged(found: Change, old: list[float], new: list[float], better: Better = "higher") -> ComparedMetric:
    return ComparedMetric(
        load="",
        metric="",
        better=better,
        old_values=old,
        new_values=new,
        old=found.old,
        new=found.new,
        change=found.change,
        low=found.low,
        high=found.high,
        p=found.p,
    )


def row(old: list[float], new: list[float], better: Better = "higher") -> ComparedMetric:
    return judged(compare_samples(old, new, RESAMPLES), old, new, better)


Draw = Callable[[np.random.Generator, int], np.ndarray]


def normal(random: np.random.Generator, starts: int) -> np.ndarray:
    return random.standard_normal(starts)


def skewed(random: np.random.Generator, starts: int) -> np.ndarray:
    return -random.exponential(size=starts)


def with_bad_starts(random: np.random.Generator, starts: int) -> np.ndarray:
    """One start in ten goes wrong by thirty times the noise of the others."""
    return random.standard_normal(starts) - 30 * (random.random(starts) < 0.1)


def simulated(
    pairs: int, *, change: float, noise: float, seed: int, control: bool = True, shape: Draw = normal
) -> tuple[Counter[str], float]:
    """Verdicts over `pairs` comparisons of servers that truly differ by `change`; how often the interval held it."""
    random = np.random.default_rng(seed)

    def draw(mean: float) -> list[float]:
        return [float(value) for value in mean * (1 + noise * shape(random, STARTS))]

    verdicts: Counter[str] = Counter()
    held = 0
    for _ in range(pairs):
        before, old, new = draw(1000), draw(1000), draw(1000 * (1 + change))
        found = row(old, new)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= change <= found.high
        control_row = row(before, old) if control else None
        verdicts[verdict(found, noise_level(found, control_row), Limits())[0]] += 1
    return verdicts, held / pairs


@pytest.mark.slow
def test_equal_servers_raise_few_false_alarms_and_mostly_rule_a_change_out() -> None:
    verdicts, held = simulated(200, change=0.0, noise=0.02, seed=1)
    assert verdicts["REGRESSION"] + verdicts["IMPROVEMENT"] <= 0.05 * 200
    assert verdicts["NO EVIDENCE"] >= 0.8 * 200
    assert held >= 0.9


def test_noise_that_would_hide_a_change_is_called_underpowered_and_not_no_evidence() -> None:
    verdicts, _ = simulated(100, change=0.0, noise=0.06, seed=3)
    assert verdicts["UNDERPOWERED"] >= 85


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("control", [True, False], ids=["A against A first", "stored sets"])
def test_error_rates_over_hundreds_of_simulated_comparisons(control: bool) -> None:
    pairs = 160
    for noise in (0.005, 0.02, 0.05):
        verdicts, held = simulated(pairs, change=0.0, noise=noise, seed=4, control=control)
        assert verdicts["REGRESSION"] + verdicts["IMPROVEMENT"] <= 0.05 * pairs
        assert 0.925 <= held <= 0.985
    for change, word in ((-0.05, "REGRESSION"), (0.05, "IMPROVEMENT")):
        verdicts, _ = simulated(pairs, change=change, noise=0.02, seed=5, control=control)
        assert verdicts[word] >= 0.9 * pairs
        assert sum(verdicts.values()) == pairs


@pytest.mark.slow
@pytest.mark.parametrize("shape", [skewed, with_bad_starts])
def test_noise_of_another_shape_raises_no_more_false_alarms(shape: Draw) -> None:
    verdicts, _ = simulated(240, change=0.0, noise=0.005, seed=7, shape=shape)
    assert verdicts["REGRESSION"] + verdicts["IMPROVEMENT"] <= 0.05 * 240


def test_change_by_hand() -> None:
    found = compare_samples([100.0, 101.0, 99.0, 100.0], [90.0, 91.0, 89.0, 90.0])
    assert (found.old, found.new) == (100.0, 90.0)
    assert found.change == pytest.approx(-0.10)
    assert found.low is not None
    assert found.high is not None
    assert found.low < -0.10 < found.high < -0.05


def test_p_is_the_exact_one_of_mann_whitney() -> None:
    """All of one side above all of the other: 2 of the 924 ways to share out 12 ranks, 2 of 70 for 8."""
    assert compare_samples([1, 2, 3, 4, 5, 6.0], [7, 8, 9, 10, 11, 12.0]).p == pytest.approx(2 / 924)
    assert compare_samples([1, 2, 3, 4.0], [7, 8, 9, 10.0]).p == pytest.approx(2 / 70)


def test_equal_values_differ_in_nothing() -> None:
    found = compare_samples([5.0] * 6, [5.0] * 6)
    assert (found.change, found.low, found.high, found.p) == (0.0, 0.0, 0.0, 1.0)


def test_same_numbers_always_get_the_same_interval() -> None:
    old, new = [1.0, 2.0, 3.0], [2.0, 2.5, 3.5]
    assert compare_samples(old, new) == compare_samples(old, new)


def test_one_start_or_a_mean_of_zero_gives_no_interval() -> None:
    assert compare_samples([1.0], [2.0]) == Change(1.0, 2.0, change=1.0)
    assert compare_samples([0.0, 0.0], [1.0, 2.0]) == Change(0.0, 1.5)


def test_sample_without_values_is_refused() -> None:
    with pytest.raises(ValueError, match="without values"):
        compare_samples([], [1.0])


def test_noise_floor_is_how_far_sets_of_one_server_lie_apart() -> None:
    random = np.random.default_rng(6)
    floor = noise_floor([float(value) for value in 1000 * (1 + 0.02 * random.standard_normal(5000))], 6, 6)
    apart = [abs(np.mean(random.normal(1000, 20, 6)) / np.mean(random.normal(1000, 20, 6)) - 1) for _ in range(5000)]
    assert floor == pytest.approx(np.quantile(apart, 0.95), rel=0.05)
    assert noise_floor([1.0], 6, 6) is None


def test_lower_is_better_turns_the_verdict_round() -> None:
    old, new = [100.0, 101, 99, 100, 102, 98], [110.0, 111, 109, 110, 112, 108]
    assert verdict(row(old, new, "higher"), 0.01, Limits())[0] == "IMPROVEMENT"
    assert verdict(row(old, new, "lower"), 0.01, Limits())[0] == "REGRESSION"


@pytest.mark.parametrize(
    ("noise", "limits", "says"),
    [
        (0.20, Limits(), "no larger than A's own noise"),
        (0.01, Limits(least_effect=0.15, must_find=0.2), "no larger than the least effect"),
    ],
)
def test_significant_change_within_noise_or_least_effect_is_no_evidence(
    noise: float, limits: Limits, says: str
) -> None:
    old, new = [100.0, 101, 99, 100, 102, 98], [110.0, 111, 109, 110, 112, 108]
    word, why = verdict(row(old, new), noise, limits)
    assert word == "NO EVIDENCE"
    assert says in why


@pytest.mark.parametrize("starts", [1, 2, 3])
def test_fewer_than_four_starts_a_side_are_underpowered_however_large_the_change(starts: int) -> None:
    old, new = [100.0, 101, 99][:starts], [200.0, 201, 199][:starts]
    found = row(old, new)
    assert verdict(found, noise_level(found, None), Limits())[0] == "UNDERPOWERED"
