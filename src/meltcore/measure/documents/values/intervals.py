"""Confidence intervals of proportions."""

import math

Z_95 = 1.959964  # two-sided 95 % of the normal distribution


def wilson_interval(successes: int, total: int, z: float = Z_95) -> tuple[float, float]:
    """Return the Wilson score interval (low, high) of `successes / total`. It is (0, 1) for a total of 0.

    The interval is reliable near 0 and 1 and for small samples. The usual +- interval can exceed the range there.
    Source: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 22 (1927).
    """
    if not 0 <= successes <= total:
        raise ValueError(f"successes must be from 0 to the total of {total}; got {successes}")
    if total == 0:
        return 0.0, 1.0
    ratio = successes / total
    weight = 1 + z * z / total
    center = (ratio + z * z / (2 * total)) / weight
    half_width = z / weight * math.sqrt(ratio * (1 - ratio) / total + z * z / (4 * total * total))
    # Exact at the ends, where rounding would leave 1e-16.
    return (center - half_width if successes else 0.0), (center + half_width if successes < total else 1.0)
