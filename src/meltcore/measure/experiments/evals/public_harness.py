"""Converts a finished evaluation into the result files of the hackathon's public harness.

GPU MODE and PyTorch held the hackathon (Paris 2026). Each field has the name and meaning that the harness writes and
its scoring program reads. Tokens are counted with the tokenizer, as in the harness. Prompts are counted without the
server's chat template, which the harness includes. So the rates in these files are never above the harness's rates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import Evaluation, LevelResult, RunResult
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.experiments.evals.config import NUM_SPOT_CHECKS
from meltcore.measure.experiments.evals.gsm8k import min_correct
from meltcore.measure.experiments.evals.throughput_prompts import NUM_REUSED_PROMPTS, NUM_WARMUPS

TASK = "gsm8k_cot"
_FLEXIBLE, _STRICT = "exact_match,flexible-extract", "exact_match,strict-match"
_RATE_DIGITS = 2  # of rates and times, as the harness rounds


class Correctness(msgspec.Struct, kw_only=True):
    """Holds the content of `results/correctness.json`.

    `accuracy` is by flexible extraction, which the gate uses. Answers are greedy, so there is no seed.
    """

    task: str
    limit: int
    seed: int | None = None
    accuracy: float
    full_results: dict[str, str | float]


class PublicLevel(msgspec.Struct, kw_only=True):
    """Holds one level of `results/throughput.json`.

    `total_*` are token counts verified with the tokenizer, `reported_*` the server's counts.
    """

    concurrency: int
    throughput_tok_per_sec: float
    total_tokens: int
    total_prompt_tokens: int
    total_completion_tokens: int
    reported_prompt_tokens: int
    reported_completion_tokens: int
    successful_requests: int
    failed_requests: int
    wall_time_sec: float
    token_discrepancy: bool
    spot_checks_passed: int
    spot_checks_total: int


class WorkloadSettings(msgspec.Struct, kw_only=True):
    """Holds the workload of `results/throughput.json`. `num_prompts` counts different prompts over all levels."""

    input_tokens: int
    output_tokens: int
    num_requests_per_level: int
    num_prompts: int
    spot_checks_per_level: int


class Throughput(msgspec.Struct, kw_only=True):
    """Holds the content of `results/throughput.json`."""

    model: str
    config: WorkloadSettings
    results: list[PublicLevel]


def correctness(result: RunResult) -> Correctness:
    """Convert the GSM8K part of `result`. Raises ConfigError if it has none."""
    evaluation = result.evaluation
    if evaluation is None or evaluation.strict_correct is None:
        raise ConfigError("this result has no GSM8K answers graded in both ways")
    is_comparable = bool(result.settings.get("comparable"))
    return Correctness(
        # Other problems or examples are another task, whose accuracy must not be taken for this one's.
        task=TASK if is_comparable else f"{result.settings.get('data')} (not {TASK})",
        limit=evaluation.total,
        accuracy=evaluation.accuracy,
        full_results={
            "alias": TASK if is_comparable else str(result.settings.get("data")),
            **_exact_match_results(evaluation, _STRICT, evaluation.strict_correct),
            **_exact_match_results(evaluation, _FLEXIBLE, evaluation.correct),
        },
    )


def throughput(result: RunResult) -> Throughput:
    """Convert the levels of `result`. Raises ConfigError for levels whose answers were not counted and checked."""
    settings = result.settings
    num_requests = int(settings["num_prompts"])
    num_drawn = len(result.levels) * (NUM_WARMUPS + num_requests - NUM_SPOT_CHECKS)
    return Throughput(
        model=str(settings["model"]),
        config=WorkloadSettings(
            input_tokens=int(settings["input_len"]),
            output_tokens=int(settings["output_len"]),
            num_requests_per_level=num_requests,
            num_prompts=NUM_REUSED_PROMPTS if settings.get("reuse_prompts") else num_drawn,
            spot_checks_per_level=NUM_SPOT_CHECKS,
        ),
        results=[_to_public_level(level) for level in result.levels],
    )


def public_score(correct: Correctness, measured: Throughput) -> float:
    """Return the score of the two files: weighted tok/s at concurrency 1 to 64, or zero below the gate.

    The gate is 87.5 % in the written rules, as here, and 85 % in the harness's scoring program.
    """
    if round(correct.accuracy * correct.limit) < min_correct(correct.limit):
        return 0.0
    rates: Mapping[int, float] = {level.concurrency: level.throughput_tok_per_sec for level in measured.results}
    return sum(weight * rates[concurrency] for concurrency, weight in WEIGHTS.items())


def _exact_match_results(evaluation: Evaluation, metric_name: str, num_correct: int) -> dict[str, float]:
    """Return the accuracy and its standard error, computed as lm-evaluation-harness does."""
    accuracy = num_correct / evaluation.total
    standard_error = math.sqrt(accuracy * (1 - accuracy) / (evaluation.total - 1)) if evaluation.total > 1 else 0.0
    metric, _, extraction = metric_name.partition(",")
    return {metric_name: accuracy, f"{metric}_stderr,{extraction}": standard_error}


def _to_public_level(level: LevelResult) -> PublicLevel:
    checks = level.checks
    if checks is None or checks.counted_content_tokens is None:
        raise ConfigError(
            f"the answers at concurrency {level.concurrency} were not counted as the public harness does; measure "
            "again: meltcore eval throughput URL --tokenizer MODEL_FOLDER"
        )
    num_prompt_tokens, num_completion_tokens = checks.counted_prompt_tokens, checks.counted_content_tokens
    return PublicLevel(
        concurrency=level.concurrency,
        throughput_tok_per_sec=_tokens_per_s(num_prompt_tokens + num_completion_tokens, level.duration_s),
        total_tokens=num_prompt_tokens + num_completion_tokens,
        total_prompt_tokens=num_prompt_tokens,
        total_completion_tokens=num_completion_tokens,
        reported_prompt_tokens=level.prompt_tokens,
        reported_completion_tokens=level.output_tokens,
        successful_requests=level.succeeded,
        failed_requests=level.failed,
        wall_time_sec=round(level.duration_s, _RATE_DIGITS),
        token_discrepancy=not checks.counts_agree,
        spot_checks_passed=checks.spot_checks_correct,
        spot_checks_total=checks.spot_checks,
    )


def _tokens_per_s(num_tokens: int, duration_s: float) -> float:
    return round(num_tokens / duration_s, _RATE_DIGITS) if duration_s > 0 else 0.0


def as_json(content: Any) -> bytes:
    """Encode a result file as the harness does, with an indentation of two spaces."""
    return msgspec.json.format(msgspec.json.encode(content), indent=2) + b"\n"
