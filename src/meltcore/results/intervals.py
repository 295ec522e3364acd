"""Confidence intervals of shares."""

import math

Z_95 = 1.959964  # two-sided 95 % of the normal distribution


def wilson(right: int, asked: int, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval (low, high) of a share `right / asked`; (0, 1) where nothing was asked.

    Sound near 0 and 1 and for small samples, where the usual +- interval leaves the range.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if not 0 <= right <= asked:
        raise ValueError(f"{right} right of {asked} asked is no share")
    if asked == 0:
        return 0.0, 1.0
    share = right / asked
    weight = 1 + z * z / asked
    middle = (share + z * z / (2 * asked)) / weight
    half = z / weight * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    # Exact at the ends, where rounding would leave 1e-16.
    return (middle - half if right else 0.0), (middle + half if right < asked else 1.0)
