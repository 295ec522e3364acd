"""Writes the files of a submission: the results in the form of the public harness, and the one-page write-up.

GPU MODE and PyTorch held the hackathon (Paris 2026). Each field of a result has the name and meaning that the harness
writes and its scoring program reads. Tokens are counted with the tokenizer, as in the harness. Prompts are counted
without the server's chat template, which the harness counts too. So the rates are at most the harness's rates.

The write-up consists of sections of the documentation and the submitted results. A missing section or decision page is
an error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import CheckResult, Evaluation, LevelResult, RunResult
from meltcore.measure.documents.values.formatting import evaluation_line, format_number
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.experiments.evals.config import NUM_SPOT_CHECKS
from meltcore.measure.experiments.evals.gsm8k import min_correct
from meltcore.measure.experiments.evals.throughput import NUM_REUSED_PROMPTS, NUM_WARMUPS

TASK = "gsm8k_cot"
_FLEXIBLE, _STRICT = "exact_match,flexible-extract", "exact_match,strict-match"
_RATE_DIGITS = 2  # of rates and times, as the harness rounds
_ARCHITECTURE_PAGE, _DECISIONS_INDEX = "docs/architecture.md", "docs/decisions/index.md"
_LIFE_HEADING = "A request's life"
_FP8_PAGE = "fp8-kv-cache.md"  # no part of a server whose cache is not FP8
# A submission is measured on one node without grammars, and the package's layout does not change its speed.
_OTHER_PAGES = (
    *("cluster-placement.md", "cluster-transport.md", "package-layout.md"),
    *("speculative-decoding.md", "structured-output.md"),
)
_DECISION = re.compile(r"^\*\*Decision:\*\*\s+(.*?)\n\n", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\([^)]*\)")
_INDEX_ROW = re.compile(r"^\| \[([^\]]+)\]\(([^)]+)\) \|", re.MULTILINE)


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
    """Return the GSM8K part of `result` in the harness's form. Raises ConfigError if it has none."""
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
    """Return the levels of `result` in the harness's form.

    Raises ConfigError for levels without counted, checked answers.
    """
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
    num_tokens, duration_s = num_prompt_tokens + num_completion_tokens, level.duration_s
    return PublicLevel(
        concurrency=level.concurrency,
        throughput_tok_per_sec=round(num_tokens / duration_s, _RATE_DIGITS) if duration_s > 0 else 0.0,
        total_tokens=num_tokens,
        total_prompt_tokens=num_prompt_tokens,
        total_completion_tokens=num_completion_tokens,
        reported_prompt_tokens=level.prompt_tokens,
        reported_completion_tokens=level.output_tokens,
        successful_requests=level.succeeded,
        failed_requests=level.failed,
        wall_time_sec=round(duration_s, _RATE_DIGITS),
        token_discrepancy=not checks.counts_agree,
        spot_checks_passed=checks.spot_checks_correct,
        spot_checks_total=checks.spot_checks,
    )


def write_up(
    source: Path, result: RunResult, gates: Sequence[CheckResult], throughput: Throughput, score: float
) -> str:
    """Return the write-up as Markdown. Raises ConfigError if a document lacks a required part.

    `source` is the checkout with the documents.
    """
    architecture = _read(source / _ARCHITECTURE_PAGE)
    parts = [
        f"# Meltcore: {throughput.model}",
        "## Approach",
        _without_links(find_section(architecture, None)),
        "## Architecture",
        _without_links(find_section(architecture, _LIFE_HEADING)),
        "## Optimizations",
        "\n".join(decision_items(source, fp8_cache="float8" in str(result.settings.get("kv_cache_dtype")))),
        "## Results",
        *_result_paragraphs(result, throughput, score),
    ]
    if gates:
        parts += ["## Rules", "\n".join(f"- {gate.status}: {gate.name} ({gate.detail})" for gate in gates)]
    return "\n\n".join([*parts, "## Reproduce", _reproduce_text(result)]) + "\n"


def find_section(text: str, heading: str | None) -> str:
    """Return the text below a heading of second level.

    If `heading` is None, return the text between the title and the first such heading. Raises ConfigError if the
    heading is missing.
    """
    sections = re.split(r"^## (.*)$", text, flags=re.MULTILINE)
    if heading is None:
        return re.sub(r"^# .*$", "", sections[0], flags=re.MULTILINE).strip()
    for heading_text, body in zip(sections[1::2], sections[2::2], strict=True):
        if heading_text.strip() == heading:
            return body.strip()
    raise ConfigError(f"the documents have no section {heading!r} for the write-up")


def decision_items(source: Path, *, fp8_cache: bool) -> list[str]:
    """Return one list item per decision page about the speed of one node. Raises ConfigError if one is missing."""
    index = source / _DECISIONS_INDEX
    rows = _INDEX_ROW.findall(_read(index))
    if not rows:
        raise ConfigError(f"{index} lists no decisions for the write-up")
    items = []
    for title, page_name in rows:
        if page_name in _OTHER_PAGES or (page_name == _FP8_PAGE and not fp8_cache):
            continue
        match = _DECISION.search(_read(index.parent / page_name))
        if match is None:
            raise ConfigError(f"{index.parent / page_name} states no decision for the write-up")
        items.append(f"- {title}: {_without_links(' '.join(match[1].split()))}")
    return items


def _result_paragraphs(result: RunResult, throughput: Throughput, score: float) -> list[str]:
    rows = ["| concurrency | weight | tok/s, prompts and answers | answered | wall s |", "|--:|--:|--:|--:|--:|"]
    rows += [
        f"| {level.concurrency} | {WEIGHTS.get(level.concurrency, 1)} | {level.throughput_tok_per_sec:,.2f} "
        f"| {level.successful_requests} of {level.successful_requests + level.failed_requests} "
        f"| {level.wall_time_sec:,.2f} |"
        for level in throughput.results
    ]
    eval_score = result.eval_score
    lines = [f"Score of these files: {score:,.2f}."]
    if eval_score is not None and eval_score.zero_reasons:
        lines.append(f"A check failed, so our own score is 0: {'; '.join(eval_score.zero_reasons)}.")
    elif eval_score is not None:
        lines.append(
            f"Counted by the server, chat template and end tokens included: "
            f"{format_number(eval_score.total_tokens_per_s)}; "
            f"answers alone: {format_number(eval_score.output_tokens_per_s)}."
        )
    accuracy = [] if result.evaluation is None else [evaluation_line(result.evaluation)]
    notes = ["\n".join(f"- {note}" for note in result.notes)] if result.notes else []
    return ["\n".join(rows), " ".join(lines), *accuracy, *notes]


def _reproduce_text(result: RunResult) -> str:
    settings, fingerprint = result.settings, result.fingerprint
    gpu_names = [gpu.name for gpu in fingerprint.gpus]
    machine = ", ".join(f"{gpu_names.count(name)} x {name}" for name in dict.fromkeys(gpu_names)) or fingerprint.cpu
    versions = ", ".join(
        f"{name} {fingerprint.versions[name]}"
        for name in ("meltcore", "torch", "triton")
        if name in fingerprint.versions
    )
    replicas, device, dtype = (settings.get(name, "not stated") for name in ("replicas", "device", "dtype"))
    return "\n".join(
        [
            "- `./start_server.sh` starts the server, waits until /health answers 200 and leaves it running.",
            f"- Served: replicas: {replicas}; device: {device}; computation: {dtype}.",
            f"- Measured on {machine}; {versions}; source {fingerprint.git_revision or 'of the installed package'}.",
        ]
    )


def _without_links(text: str) -> str:
    """Return the text without images, and without links to pages that are not part of the submission."""
    return re.sub(r"\n{3,}", "\n\n", _LINK.sub(lambda link: "" if link[1] else link[2], text)).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path} for the write-up: {error.strerror}") from error
