"""Targets of the offline API by model, GPUs, work and unit; the weighted throughput of a set of levels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench_output import Target
from offline_work import Work

from meltcore.measure.documents.weights import WEIGHTS

RATE, SUM, START = "output tokens/s", "total tokens/s, weighted", "process start to first token"
ONE_REQUEST, MANY_REQUESTS = "1 request, 1024 in / 256 out", "{} requests, 1024 in / 256 out"
_REACH: dict[tuple[str, int], dict[tuple[str, str], float]] = {
    ("Qwen/Qwen3-0.6B", 1): {
        ("10 requests, 128 to 1024 in / 128 out", RATE): 2.0,
        ("100 requests, 128 to 1024 in / 128 out", RATE): 1.4,
        ("400 requests, 128 to 1024 in / 128 out", RATE): 1.2,
        ("1,000 requests, 128 to 1024 in / 128 out", RATE): 1.25,
        ("2,000 requests, 128 to 1024 in / 128 out", RATE): 1.25,
        ("64 requests, 1024 in / 1024 out", RATE): 1.2,
        ("256 requests, 1024 in / 1024 out", RATE): 1.1,
        ("1 request, 128 to 1024 in / 128 out", "ms per token"): 0.75,
        (START, "s"): 20.0,
    },
    ("Qwen/Qwen3.5-35B-A3B", 1): {
        ("1 request, 1024 in / 256 out", RATE): 2.0,
        ("8 requests, 1024 in / 256 out", RATE): 1.3,
        ("16 requests, 1024 in / 256 out", RATE): 1.2,
        ("64 requests, 1024 in / 256 out", RATE): 1.05,
        ("256 requests, 1024 in / 256 out", RATE): 1.05,
    },
    ("Qwen/Qwen3.5-35B-A3B", 8): {
        ("1 request, 1024 in / 1024 out", RATE): 2.0,
        ("8 requests, 1024 in / 1024 out", RATE): 2.2,
        ("32 requests, 1024 in / 1024 out", RATE): 2.2,
        ("64 requests, 1024 in / 1024 out", RATE): 2.2,
        ("weighted throughput, 1024 in / 277 out", SUM): 800_000.0,
        (START, "s"): 45.0,
    },
    ("Qwen/Qwen3-30B-A3B", 1): {
        (f"{requests:,} requests, 128 to 1024 in / 128 out", RATE): 1.2 for requests in (10, 100, 400, 1_000, 10_000)
    },
    # Beside llama.cpp.
    ("gemma-3-27b-q4_0.gguf", 1): {(ONE_REQUEST, RATE): 1.8, (MANY_REQUESTS.format(64), RATE): 3.5},
    ("qwen3-30b-a3b-q8_0.gguf", 1): {(ONE_REQUEST, RATE): 2.5, (MANY_REQUESTS.format(64), RATE): 5.0},
    # Beside vLLM.
    **{
        (model, 1): {
            (ONE_REQUEST, RATE): 1.2,
            (MANY_REQUESTS.format(16), RATE): 1.2,
            (MANY_REQUESTS.format(64), RATE): 1.1,
            (MANY_REQUESTS.format(256), RATE): 1.05,
        }
        for model in ("Qwen/Qwen3-30B-A3B-FP8", "Qwen/Qwen3.5-35B-A3B-FP8")
    },
    ("meta-llama/Llama-3.1-8B-Instruct", 1): {
        (ONE_REQUEST, RATE): 1.15,
        (MANY_REQUESTS.format(64), RATE): 1.05,
        (MANY_REQUESTS.format(256), RATE): 1.05,
    },
    ("google/gemma-3-27b-it", 1): {(ONE_REQUEST, RATE): 1.0, (MANY_REQUESTS.format(64), RATE): 1.03},
}

# A rate is bound by its ratio to the peer of the same run; times and weighted throughputs by their own values.
TARGETS = {
    subject: {
        (work, unit): Target(
            reach, "ratio" if unit == RATE else "value", "lower" if unit in ("ms per token", "s") else "higher"
        )
        for (work, unit), reach in reaches.items()
    }
    for subject, reaches in _REACH.items()
}
TARGETS["Qwen/Qwen3.5-35B-A3B, 3 drafts by mtp, synthetic acceptance length 3.33", 1] = {
    (ONE_REQUEST, RATE): Target(650.0),
    **{
        (MANY_REQUESTS.format(requests), RATE): Target(rate)
        for requests, rate in ((4, 1_200.0), (8, 1_600.0), (16, 2_350.0), (32, 3_750.0), (64, 6_000.0))
    },
}


def weighted_throughputs(works: Sequence[Work], rate_of: Callable[[Work], float | None]) -> dict[str, float]:
    """Weighted throughput by name, for each pair of lengths of which all seven levels have a rate.

    `rate_of` returns output tokens per second. The result counts prompt tokens too.
    """
    sums = {}
    for low, high, out in dict.fromkeys(work[1:] for work in works):
        rates = {load: rate_of(Work(load, low, high, out)) for load in WEIGHTS}
        found = {load: rate for load, rate in rates.items() if rate is not None}
        if low == high and len(found) == len(WEIGHTS):
            total = sum(WEIGHTS[load] * rate for load, rate in found.items())
            sums[f"weighted throughput, {low} in / {out} out"] = total * (low + out) / out
    return sums
