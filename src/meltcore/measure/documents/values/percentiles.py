"""Computes the percentiles for which there are enough samples.

The rule is MLPerf's early stopping at 99 % confidence (https://github.com/mlcommons/inference_policies, appendix on
early stopping). It assumes that the true fraction below the estimate of a percentile p is only p. The percentile may be
stated from n samples if the chance of at most one sample above the estimate is then at most 1 %. That takes 11 samples
for the median, 64 for p90, 130 for p95, 662 for p99 and 6,636 for p99.9. With fewer samples, reports show "n too
small".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meltcore.measure.documents.schema import Distribution

if TYPE_CHECKING:  # `distribution` imports it: the help of commands reads this file
    import numpy as np
    import numpy.typing as npt

SAMPLES_NEEDED: dict[str, int] = {"p50": 11, "p90": 64, "p95": 130, "p99": 662, "p999": 6_636}
QUANTILES: dict[str, float] = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99, "p999": 0.999}
TOO_SMALL = "n too small"


def distribution(samples: Sequence[float] | npt.NDArray[np.float64]) -> Distribution:
    """Return the summary of `samples` [n]. A percentile is None if n is too small.

    Raises ValueError for NaN or infinity.
    """
    import numpy as np

    sample_values = np.asarray(samples, dtype=np.float64)
    if sample_values.size == 0:
        return Distribution()
    if not np.isfinite(sample_values).all():
        raise ValueError("a sample is not finite")
    names = [name for name, min_samples in SAMPLES_NEEDED.items() if sample_values.size >= min_samples]
    quantiles = np.quantile(sample_values, [QUANTILES[name] for name in names])
    percentiles = {name: float(value) for name, value in zip(names, quantiles, strict=True)}
    return Distribution(
        n=int(sample_values.size),
        mean=float(sample_values.mean()),
        min=float(sample_values.min()),
        max=float(sample_values.max()),
        **percentiles,
    )
