"""Prompts, division of time, engine settings, and the numbers made of counts."""

import hashlib
import math

import msgspec
import numpy as np
import pytest
from sample_scores import sample_score_level

from meltcore.measure.documents.score import ScoreLevel
from meltcore.measure.score import workload
from meltcore.measure.score.counting import best_level, rates_over_time, spread
from meltcore.measure.score.workload import LEVEL_FRACTIONS, SUSTAINED_FRACTION, concurrent_sequences, gpu_settings

GIB = 2**30


def test_prompts_of_version_1_never_change() -> None:
    """A change needs another version; otherwise scores of different workloads would be ranked."""
    assert workload.PRECISIONS["bf16"].name == "gpu-score/1"
    prompts = [workload.prompt(number, 151_936) for number in (0, 1, 2, 1_000_000, 7_000_123)]
    digest = hashlib.sha256(msgspec.json.encode(prompts)).hexdigest()
    assert digest[:16] == "1acec06a1a82207f"
    assert (workload.OUTPUT_TOKENS, workload.LEVELS) == (128, (1, 10, 100, 400, 1_000, 10_000))


def test_prompts_equal_splitmix64_in_plain_python() -> None:
    def in_plain_python(number: int) -> list[int]:
        mask, gamma, draws = 2**64 - 1, 0x9E3779B97F4A7C15, []
        state = (20_261_121 + number * 1025 * gamma) & mask
        for _ in range(1025):
            state = (state + gamma) & mask
            mixed = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & mask
            mixed = ((mixed ^ mixed >> 27) * 0x94D049BB133111EB) & mask
            draws.append((mixed ^ mixed >> 31) >> 32)
        length = 128 + (draws[0] * 897 >> 32)
        return [1_000 + (draw * 139_000 >> 32) for draw in draws[1 : length + 1]]

    for number in (0, 1, 7_000_123):
        assert workload.prompt(number, 151_936) == in_plain_python(number)


def test_prompts_have_128_to_1024_tokens_and_all_differ() -> None:
    prompts = [workload.prompt(number, 151_936) for number in range(3_000)]
    lengths = [len(prompt) for prompt in prompts]
    assert (min(lengths), max(lengths)) == (128, 1024)
    assert abs(np.mean(lengths) - 576) < 15
    assert all(1_000 <= token < 140_000 for prompt in prompts[:100] for token in prompt)
    assert len({tuple(prompt[:64]) for prompt in prompts}) == 3_000
    assert max(workload.prompt(0, 824)) < 824, "a small vocabulary is used whole"


def test_ladder_and_sustained_run_leave_5_percent_for_the_start() -> None:
    assert tuple(LEVEL_FRACTIONS) == workload.LEVELS
    assert math.isclose(sum(LEVEL_FRACTIONS.values()) + SUSTAINED_FRACTION, 0.95)


@pytest.mark.parametrize("gib", [6, 8, 12, 16, 24, 40, 48])
def test_sequences_fill_the_gpus_memory(gib: int) -> None:
    token_bytes = 2 * 28 * 8 * 128 * 2  # keys and values of 28 layers, 8 heads of 128, two bytes each
    held = concurrent_sequences(gib * GIB) * (576 + 64) * token_bytes
    assert 0.6 * gib * GIB < held + 2.25 * GIB < 0.92 * gib * GIB


def test_sequences_are_limited_for_large_and_small_gpus() -> None:
    assert [concurrent_sequences(gib * GIB) for gib in (80, 141, 192)] == [1024, 1024, 1024]
    assert concurrent_sequences(2 * GIB) == 16
    assert gpu_settings(None, 6 * GIB)["max_num_batched_tokens"] == 2048
    assert gpu_settings(None, 141 * GIB)["max_num_batched_tokens"] == 8192


def test_memory_in_use_holds_no_sequences() -> None:
    free, shared = (gpu_settings(None, 6 * GIB, in_use_bytes=used) for used in (0, GIB))
    assert free["max_num_seqs"] > shared["max_num_seqs"] == concurrent_sequences(5 * GIB)
    assert gpu_settings(None, 141 * GIB, in_use_bytes=GIB) == gpu_settings(None, 141 * GIB)


def test_named_model_brings_its_weights() -> None:
    assert gpu_settings(None, 141 * GIB)["load_format"] == "dummy"
    named = gpu_settings("./Qwen3-0.6B", 141 * GIB)
    assert (named["model"], named["load_format"], named["dtype"]) == ("./Qwen3-0.6B", "auto", "bfloat16")


def level(concurrency: int, rate: float) -> ScoreLevel:
    return msgspec.structs.replace(sample_score_level(concurrency, 0, 10), output_tokens_per_s=rate)


def test_sustained_run_takes_the_lowest_level_within_1_percent_of_the_best() -> None:
    assert best_level([level(100, 900), level(1_000, 995), level(10_000, 1_000)]) == 1_000
    assert best_level([level(100, 900), level(1_000, 980), level(10_000, 1_000)]) == 10_000
    assert best_level([level(1, 10)]) == 1


def steady(rate_of: list[float], bucket_s: float = 10.0) -> tuple[np.ndarray, np.ndarray, float]:
    """Ten steps per second from 0, with `rate_of[i]` tokens per second in bucket i."""
    times = np.arange(1, int(len(rate_of) * bucket_s * 10) + 1) / 10
    tokens = np.array([rate_of[int((time - 0.05) // bucket_s)] / 10 for time in times])
    return times, tokens, len(rate_of) * bucket_s


def test_even_rate_has_no_variation_and_falling_rate_drifts() -> None:
    times, tokens, end_s = steady([1000.0] * 12)
    even = spread(times, tokens, 0, end_s)
    assert even.rates == pytest.approx([1000.0] * 12)
    assert (even.bucket_s, even.variation, even.change) == pytest.approx((10.0, 0.0, 0.0))
    assert not even.drifts
    times, tokens, end_s = steady([1000.0] * 6 + [950.0] * 6)
    falling = spread(times, tokens, 0, end_s)
    assert falling.change == pytest.approx(-0.05)
    assert falling.drifts
    times, tokens, end_s = steady([1000.0] * 6 + [1050.0] * 6)
    assert not spread(times, tokens, 0, end_s).drifts, "an increase is no drift"


def test_short_window_has_finer_buckets_and_no_trend() -> None:
    times, tokens, _ = steady([100.0] * 4)
    assert len(spread(times, tokens, 0, 30).rates) == 6
    short = spread(times, tokens, 0, 4)
    assert (len(short.rates), short.change) == (4, None)


def test_rates_over_time_add_up_to_all_tokens() -> None:
    times, tokens, _ = steady([100.0, 300.0])
    rates = rates_over_time(times, tokens, 0.0, 19.95, 1.0)
    assert rates == pytest.approx([100.0] * 10 + [300.0] * 10)
