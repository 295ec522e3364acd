"""Finding the largest value that works, where every try costs a start of a server. Pure."""

from __future__ import annotations

from collections.abc import Callable


def largest(works: Callable[[int], bool], least: int, most: int, step: int) -> int | None:
    """The largest multiple of `step` from `least` to `most` that works, to within one step; None where none does.

    It takes that whatever is smaller than a working value works too. `most` is tried first, for it is often the answer;
    then it doubles from `least`, because a start far above the limit is the slowest way to fail; then it halves.
    """
    low, high = -(-least // step), most // step
    if high < low:
        raise ValueError(f"no multiple of {step} lies from {least} to {most}")
    if works(high * step):
        return high * step
    if low == high or not works(low * step):
        return None
    good, bad = low, high
    while 2 * good < bad and works(2 * good * step):
        good *= 2
    bad = min(bad, 2 * good)
    while bad - good > 1:
        middle = (good + bad) // 2
        if works(middle * step):
            good = middle
        else:
            bad = middle
    return good * step
