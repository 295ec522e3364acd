"""A run result as rich as a real demo's, for the tests of report, tables and comparison."""

import math

import numpy as np

from meltcore.measure.documents.schema import (
    CheckResult,
    ClientLoad,
    Evaluation,
    Fingerprint,
    IncorrectAnswer,
    LevelResult,
    RunResult,
    SteadyWindow,
    TimelinePoint,
)
from meltcore.measure.documents.values.percentiles import distribution


def sample_level(concurrency: int, **changes: object) -> LevelResult:
    """A level that went well, with latencies that grow with concurrency."""
    requests = max(200, concurrency)
    random = np.random.default_rng(concurrency)
    ttft = 8 * concurrency**0.8 * random.lognormal(0, 0.4, requests)
    itl = 1.5 * concurrency**0.5 * random.lognormal(0, 0.3, requests * 12)
    duration_s = 4 + concurrency**0.45
    rate = 4000 * (1 - math.exp(-concurrency / 150))
    level = LevelResult(
        concurrency=concurrency,
        requests=requests,
        succeeded=requests,
        failed=0,
        peak_in_flight=concurrency,
        server_peak_in_flight=concurrency,
        accuracy=0.995,
        duration_s=duration_s,
        output_tokens_per_s=rate,
        total_tokens_per_s=rate * 3,
        prompt_tokens=requests * 40,
        output_tokens=requests * 12,
        workload="problems:short",
        warmup_requests=8,
        steady=SteadyWindow(start_s=0.4, end_s=duration_s * 0.7, output_tokens_per_s=rate * 1.15),
        ttft_ms=distribution(ttft),
        itl_ms=distribution(itl),
        tpot_ms=distribution(itl[:requests]),
        e2e_ms=distribution(ttft + 12 * itl[:requests]),
        queue_delay_ms=distribution(random.lognormal(-1, 0.5, requests)),
        events_per_token=0.98,
        client=ClientLoad(cpu_utilization=0.31, loop_lag_p99_ms=3.2),
        timeline=[
            TimelinePoint(
                t_s=float(second),
                output_tokens_per_s=rate * (0.4 if second == 0 else 1 + 0.1 * math.sin(second)),
                in_flight=int(concurrency * max(0.0, 1 - (second / duration_s) ** 6)),
            )
            for second in range(int(duration_s) + 1)
        ],
    )
    for name, value in changes.items():
        setattr(level, name, value)
    return level


def sample_run(levels: list[LevelResult] | None = None, **changes: object) -> RunResult:
    result = RunResult(
        command="demo",
        status="complete",
        started="2026-11-21T12:00:00Z",
        duration_s=231.4,
        fingerprint=Fingerprint(
            cpu="Example CPU @ 2.50GHz",
            cores=2,
            memory_bytes=16 * 2**30,
            kernel="Linux 6.1",
            python="3.11.7",
            versions={"meltcore": "0.1.0", "torch": "2.11.0", "numpy": "2.4.6"},
            git_revision="0123456789abcdef",
            arguments=["demo", "--levels", "10,100"],
            seed=0,
            taken="2026-11-21T12:00:00+00:00",
        ),
        settings={"model": "meltcore/sums", "levels": [10, 100], "stream": True},
        accuracy=0.995,
        evaluation=Evaluation(
            total=200,
            correct=199,
            failed=0,
            ci_low=0.9722,
            ci_high=0.9991,
            incorrect=[IncorrectAnswer(question="What is 7 * 8?", expected="56", actual="The answer is 54.")],
        ),
        checks=[
            CheckResult(name="GET /health answers 200", status="PASS"),
            CheckResult(name="an unknown model is a 404 in OpenAI's form", status="PASS", detail="model_not_found"),
        ],
        levels=[sample_level(n) for n in (10, 100, 400, 1000, 10_000)] if levels is None else levels,
    )
    for name, value in changes.items():
        setattr(result, name, value)
    return result
