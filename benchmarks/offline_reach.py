"""What was asked of the offline API: by model and GPUs, work and unit; times the peer's rate, milliseconds, seconds or
tokens a second. And the speed sum of a row of works, as the throughput evaluation weighs its levels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offline_work import Work

from meltcore.results.weights import WEIGHTS

RATE, SUM, START = "output tokens/s", "tokens/s, prompts too, weighted", "process start to first token"
REACH: dict[tuple[str, int], dict[tuple[str, str], float]] = {
    ("Qwen/Qwen3-0.6B", 1): {
        ("10 requests, 128 to 1024 in / 128 out", RATE): 2.0,
        ("100 requests, 128 to 1024 in / 128 out", RATE): 1.4,
        ("400 requests, 128 to 1024 in / 128 out", RATE): 1.2,
        ("1,000 requests, 128 to 1024 in / 128 out", RATE): 1.25,
        ("2,000 requests, 128 to 1024 in / 128 out", RATE): 1.25,
        ("64 requests, 1024 in / 1024 out", RATE): 1.2,
        ("256 requests, 1024 in / 1024 out", RATE): 1.1,
        ("1 requests, 128 to 1024 in / 128 out", "ms a token"): 0.75,
        (START, "s"): 20.0,
    },
    ("Qwen/Qwen3.5-35B-A3B", 1): {
        ("1 requests, 1024 in / 256 out", RATE): 2.0,
        ("8 requests, 1024 in / 256 out", RATE): 1.3,
        ("16 requests, 1024 in / 256 out", RATE): 1.2,
        ("64 requests, 1024 in / 256 out", RATE): 1.05,
        ("256 requests, 1024 in / 256 out", RATE): 1.05,
    },
    ("Qwen/Qwen3.5-35B-A3B", 8): {
        ("1 requests, 1024 in / 1024 out", RATE): 2.0,
        ("8 requests, 1024 in / 1024 out", RATE): 2.2,
        ("32 requests, 1024 in / 1024 out", RATE): 2.2,
        ("64 requests, 1024 in / 1024 out", RATE): 2.2,
        ("speed sum, 1024 in / 277 out", SUM): 800_000.0,
        (START, "s"): 45.0,
    },
    ("Qwen/Qwen3-30B-A3B", 1): {
        (f"{requests:,} requests, 128 to 1024 in / 128 out", RATE): 1.2 for requests in (10, 100, 400, 1_000, 10_000)
    },
}


def speed_sums(works: Sequence[Work], rate_of: Callable[[Work], float | None]) -> dict[str, float]:
    """By its name, for every length of prompts and answers of which all seven levels have a rate.

    `rate_of` gives output tokens a second; counted are prompts and answers.
    """
    sums = {}
    for low, high, out in dict.fromkeys(work[1:] for work in works):
        rates = {load: rate_of(Work(load, low, high, out)) for load in WEIGHTS}
        found = {load: rate for load, rate in rates.items() if rate is not None}
        if low == high and len(found) == len(WEIGHTS):
            total = sum(WEIGHTS[load] * rate for load, rate in found.items())
            sums[f"speed sum, {low} in / {out} out"] = total * (low + out) / out
    return sums
