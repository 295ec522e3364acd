"""GPU scores as rich as a real run's, for the tests of page, console and ranking. The numbers are made up."""

import math

import numpy as np
from sample_results import sample_run

from meltcore.measure.documents.score import (
    GpuHealth,
    GpuScore,
    MetricRow,
    Score,
    ScoredRun,
    ScoreLevel,
    Spread,
    TimeSeries,
)
from meltcore.measure.documents.values.percentiles import distribution

LADDER = {1: 12.0, 10: 12.0, 100: 18.0, 400: 18.0, 1_000: 24.0, 10_000: 36.0}
SUSTAINED_S = 165.0


def sample_score_level(concurrency: int, start_s: float, length_s: float, peak: float = 32_000.0) -> ScoreLevel:
    random = np.random.default_rng(concurrency)
    rate = peak * (1 - math.exp(-concurrency / 90))
    ramp_s = min(length_s / 2, 0.2 + concurrency**0.5 / 8)
    window_s = length_s - ramp_s
    finished = int(rate / 128 * window_s)
    power_w = 180 + 480 * rate / peak
    return ScoreLevel(
        concurrency=concurrency,
        start_s=start_s,
        ramp_s=ramp_s,
        window_s=window_s,
        output_tokens=int(rate * window_s),
        prompt_tokens=int(rate * window_s * 4.5),
        finished=finished,
        waiting=max(0, concurrency - 1024 - finished),
        output_tokens_per_s=rate,
        total_tokens_per_s=rate * 5.5,
        requests_per_s=rate / 128,
        ttft_ms=distribution(12 * concurrency**0.7 * random.lognormal(0, 0.3, finished)),
        itl_ms=distribution(min(concurrency, 1024) / rate * 1000 * random.lognormal(0, 0.2, 5000)),
        e2e_ms=distribution(concurrency / rate * 128_000 * random.lognormal(0, 0.1, finished)),
        power_w=power_w,
        tokens_per_joule=rate / power_w,
        ramp_cut=concurrency == 10_000,
    )


def sample_health(**changes: object) -> GpuHealth:
    health = GpuHealth(
        verdict="HEALTHY",
        metrics=[
            MetricRow(key="temperature_c", name="GPU temperature", unit="°C", mean=58.2, maximum=61),
            MetricRow(key="power_w", name="power", unit="W", mean=655.4, maximum=699),
            MetricRow(key="energy_j", name="energy", unit="J", increase=108_141),
            MetricRow(key="memory_used_bytes", name="memory used", unit="bytes", mean=120e9, maximum=121e9),
            MetricRow(key="nvlink_tx_mib_per_s", name="NVLink sent", unit="MiB/s", absent="NOT_APPLICABLE"),
            MetricRow(
                key="nvml_utilization_percent",
                name="NVML utilization",
                unit="%",
                mean=100,
                maximum=100,
                note="shown and never judged",
            ),
        ],
        clock_reasons={"SW_POWER_CAP": 0.34},
        samples=2950,
    )
    for name, value in changes.items():
        setattr(health, name, value)
    return health


def sample_device(peak: float = 32_000.0, label: str = "GPU 0", **changes: object) -> GpuScore:
    levels, at = [], 0.0
    for concurrency, length_s in LADDER.items():
        levels.append(sample_score_level(concurrency, at, length_s, peak))
        at += length_s
    sustained = sample_score_level(1_000, at, SUSTAINED_S, peak)
    random = np.random.default_rng(0)
    all_levels = [*levels, sustained]
    rates, powers = [], []
    for second in range(int(at + SUSTAINED_S)):
        level = next(level for level in all_levels if second < level.end_s)
        share = 1.0 if second > level.start_s + level.ramp_s else 0.7
        rates.append(round(level.output_tokens_per_s * share * float(random.normal(1, 0.01)), 1))
        powers.append(round((level.power_w or 0) * float(random.normal(1, 0.02)), 1))
    device = GpuScore(
        name="NVIDIA H200",
        label=label,
        uuid="GPU-00000000-fake",
        memory_bytes=141 * 2**30,
        engine_settings={"load_format": "dummy", "max_num_seqs": 1024},
        levels=levels,
        sustained=sustained,
        spread=Spread(
            bucket_s=10.1, rates=[peak * f for f in (1, 0.998, 1.001, 0.999, 1, 1)], variation=0.004, change=-0.001
        ),
        health=sample_health(),
        lines=TimeSeries(
            bucket_s=1.0,
            values={
                "output_tokens_per_s": [*rates],
                "power_w": [*powers],
                "temperature_c": [35 + 25 * (1 - math.exp(-i / 60)) for i in range(len(rates))],
                "memory_temperature_c": [40 + 30 * (1 - math.exp(-i / 80)) for i in range(len(rates))],
                "sm_clock_mhz": [1980.0 if i < 60 or i > 70 else None for i in range(len(rates))],
                "memory_clock_mhz": [3201.0] * len(rates),
                "sm_active_percent": [30 + 60 * rate / peak for rate in rates],
                "sm_occupancy_percent": [10 + 20 * rate / peak for rate in rates],
                "tensor_percent": [35 * rate / peak for rate in rates],
                "dram_bandwidth_percent": [20 + 30 * rate / peak for rate in rates],
            },
        ),
        load_s=9.1,
        measurer_lag_p99_ms=0.8,
    )
    for name, value in changes.items():
        setattr(device, name, value)
    return device


def sample_scored_run(devices: list[GpuScore] | None = None, **changes: object) -> ScoredRun:
    """A whole result; `changes` are of its Score."""
    devices = [sample_device()] if devices is None else devices
    rates = [device.output_tokens_per_s for device in devices]
    score = Score(
        workload="gpu-score/1",
        engine="0.1.0+1f2e3d4c",
        model="Qwen/Qwen3-0.6B",
        dtype="bfloat16",
        weights="dummy",
        duration_s=300.0,
        output_tokens_per_s=None if None in rates else sum(rate or 0.0 for rate in rates),
        devices=devices,
    )
    for name, value in changes.items():
        setattr(score, name, value)
    base = sample_run([])
    return ScoredRun(
        command="bench",
        status="complete",
        started=base.started,
        duration_s=298.0,
        fingerprint=base.fingerprint,
        notes=["Random weights: the speed is that of the real ones, the answers mean nothing."],
        score=score,
    )
