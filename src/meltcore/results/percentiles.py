"""Percentiles only where the sample is large enough to mean one.

The rule is MLPerf's early stopping at 99 % confidence (https://github.com/mlcommons/inference_policies, appendix on
early stopping): a percentile p may be stated from n samples when, were the true share below the estimate only p, the
chance of seeing at most one sample above it would be at most 1 %. That asks for 11 samples for the median, 64 for p90,
130 for p95, 662 for p99 and 6,636 for p99.9. With fewer, the word is "n too small", not a number.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from meltcore.results.schema import Distribution

SAMPLES_NEEDED: dict[str, int] = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p999": 6_636}
QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}
TOO_SMALL = "n too small"


def distribution(samples: Sequence[float] | npt.NDArray[np.float64]) -> Distribution:
    """Summarise `samples` [n]; a percentile that n is too small for stays None. ValueError on NaN or infinity."""
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        return Distribution()
    if not np.isfinite(values).all():
        raise ValueError("a sample is not finite, so the distribution would mean nothing")
    names = [name for name, needed in SAMPLES_NEEDED.items() if values.size >= needed]
    found = np.quantile(values, [QUANTILES[name] for name in names])
    percentiles = {name: float(value) for name, value in zip(names, found, strict=True)}
    return Distribution(
        n=int(values.size), mean=float(values.mean()), min=float(values.min()), max=float(values.max()), **percentiles
    )
