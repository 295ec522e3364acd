"""What two samples of server starts say: the change between them, its interval, and p.

The unit is a fresh start of a server. Requests of one start share its luck (memory layout, clocks, neighbours), so
thousands of them are still one observation: a comparison within one start called identical source 9 % slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

RESAMPLES = 4999
CONFIDENCE = 0.95
_SEED = 20_261_121  # of the bootstrap: the same numbers always get the same interval


@dataclass(frozen=True)
class Change:
    """`change` is new over old minus one; it, its interval and `p` are None where the samples cannot give one."""

    old: float
    new: float
    n_old: int
    n_new: int
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None


def compare_samples(old: Sequence[float], new: Sequence[float], resamples: int = RESAMPLES) -> Change:
    """Both samples hold one value a start. The means, their relative change, a bootstrap interval, Mann-Whitney's p."""
    before, after = np.asarray(old, dtype=np.float64), np.asarray(new, dtype=np.float64)
    if not before.size or not after.size:
        raise ValueError("a sample without values compares with nothing")
    means = float(before.mean()), float(after.mean())
    sizes = before.size, after.size
    if means[0] == 0:
        return Change(*means, *sizes)
    change = means[1] / means[0] - 1
    if min(sizes) < 2:
        return Change(*means, *sizes, change=change)
    low, high = _interval(before, after, resamples)
    return Change(*means, *sizes, change=change, low=low, high=high, p=_mann_whitney(before, after))


def noise_floor(control: Sequence[float], n_old: int, n_new: int) -> float | None:
    """How far two sets of `n_old` and `n_new` starts of ONE server lie apart, relative, 19 times in 20.

    From the spread of `control`, starts of one server one after another. None where there are too few to have one.
    """
    values = np.asarray(control, dtype=np.float64)
    if values.size < 2 or values.mean() == 0:
        return None
    spread = float(values.std(ddof=1) / abs(values.mean()))
    return 1.96 * spread * math.sqrt(1 / n_old + 1 / n_new)


def _mann_whitney(old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> float:
    """Two-sided p; exact for small samples without ties, which is what scipy picks by itself."""
    from scipy.stats import mannwhitneyu  # a second to import, and only comparisons need it

    if np.unique(np.concatenate([old, new])).size == 1:
        return 1.0
    return float(mannwhitneyu(old, new, alternative="two-sided").pvalue)


def _interval(
    old: npt.NDArray[np.float64], new: npt.NDArray[np.float64], resamples: int
) -> tuple[float | None, float | None]:
    """Bootstrap interval of the change of means, widened for few starts.

    The plain percentile interval of six values holds the truth some 90 times in 100. The expanded one takes the
    quantiles that make it as wide as Student's: T. Hesterberg, "What Teachers Should Know About the Bootstrap",
    The American Statistician 69 (2015), section 5.3.
    """
    from scipy.stats import bootstrap, norm, t

    fewest = min(old.size, new.size)
    tail = norm.cdf(math.sqrt(fewest / (fewest - 1)) * t.ppf((1 - CONFIDENCE) / 2, old.size + new.size - 2))
    found = bootstrap(
        (old, new),
        lambda before, after, axis: after.mean(axis=axis) / before.mean(axis=axis) - 1,
        n_resamples=resamples,
        confidence_level=float(1 - 2 * tail),
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(_SEED),
    ).confidence_interval
    low, high = float(found.low), float(found.high)
    return (low, high) if math.isfinite(low) and math.isfinite(high) else (None, None)
