"""Runs `meltcore eval throughput` once: levels by the load generator, checks of their answers, the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.schema import CheckResult, LevelChecks, LevelResult, RunResult, WeightedThroughput
from meltcore.measure.documents.served_model import model_notes
from meltcore.measure.documents.verdicts import CUT_SHORT, SCORED, worst_verdict
from meltcore.measure.documents.weights import missing_concurrencies, weighted_sum
from meltcore.measure.experiments.evals.config import ThroughputConfig
from meltcore.measure.experiments.evals.throughput_prompts import (
    NUM_WARMUPS,
    PlannedRequest,
    PromptPlan,
    TextGenerator,
    make_plan,
)
from meltcore.measure.experiments.servers.api import Api
from meltcore.measure.load.config import RANDOM_HIGH_ID, LoadConfig
from meltcore.measure.load.record import RequestRecord
from meltcore.measure.load.run.runner import run_levels
from meltcore.measure.load.run.streams import OnProgress

PROMPTS_FILE = "prompts.jsonl"

# Random text need not encode to the tokens it was decoded from; the public harness allows as much.
TOLERANCE_RATIO = 0.05
TOLERANCE_TOKENS = 10
# What a chat template may add to one message: Qwen3.5 adds 12 tokens, Llama 3 with its system message about 36. Not in
# addition to the tolerance above: a server that counts too much could hide in both.
MAX_TEMPLATE_TOKENS = 64
# Most prompt tokens of a level from a prefix cache: all prompts are new, and only their template is the same.
MAX_CACHED_RATIO = 0.05
# Most empty answers of a level: more of them are not chance, and are cheap work.
MAX_EMPTY_RATIO = 0.05


def run_throughput(
    config: ThroughputConfig,
    folder: Path,
    arguments: Sequence[str] = (),
    on_progress: OnProgress | None = None,
    report: Callable[[str], None] | None = None,
) -> RunResult:
    """Build every prompt, run the levels and return the result. Prompts and records are written into `folder`.

    `report` receives a line of progress while the prompts are built, which takes seconds with some tokenizers.

    The verdict is FAILED if a request, a spot check, a token count or a fixed length is wrong at any level. Raises
    ConfigError if the run cannot start.
    """
    api = Api(config.url, api_key=config.api_key)
    model, facts = api.resolve_model(config.model)
    generator = None if config.tokenizer is None else TextGenerator(config.tokenizer)
    if report is not None:
        num_prompts = (NUM_WARMUPS + config.num_prompts) * len(config.levels)
        report(f"making {num_prompts:,} prompts of {config.input_len:,} tokens")
    plan = make_plan(config, generator)
    plan.write(folder / PROMPTS_FILE)
    started, start_s = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    levels = _run_levels(config, plan, folder, model, generator, on_progress)
    verdict = worst_verdict((level.verdict for level in levels), "PARTIAL")
    gates = make_gates(config, levels)
    return RunResult(
        command="eval",
        status="partial" if verdict in CUT_SHORT else "complete",
        started=started,
        duration_s=time.monotonic() - start_s,
        fingerprint=take_fingerprint(arguments, config.seed),
        settings=_settings(config) | {"model": model} | facts,
        gates=gates,
        levels=levels,
        weighted_throughput=weighted_throughput(levels) if config.speed_only else None,
        verdict=verdict,
        reasons=[f"gate failed: {gate.name}: {gate.detail}" for gate in gates if gate.status == "FAIL"],
        notes=[*_notes(config, levels), *model_notes(facts)],
    )


def weighted_throughput(levels: Sequence[LevelResult]) -> WeightedThroughput | None:
    """Return the weighted sum of the throughput, or None unless all seven levels have a valid result."""
    valid_levels = [level for level in levels if level.verdict in SCORED]
    if missing_concurrencies(valid_levels):
        return None
    return WeightedThroughput(
        total_tokens_per_s=weighted_sum(valid_levels, "total_tokens_per_s"),
        output_tokens_per_s=weighted_sum(valid_levels, "output_tokens_per_s"),
    )


def load_config(config: ThroughputConfig, model: str, folder: Path) -> LoadConfig:
    """Return the load generator's settings for the levels, requests and warm-ups of `config`."""
    return LoadConfig(
        url=config.url,
        concurrency=config.levels,
        num_prompts=(config.num_prompts,),
        num_warmups=NUM_WARMUPS,
        workload=str(folder / PROMPTS_FILE),
        model=model,
        api_key=config.api_key,
        seed=config.seed,
        stream=config.stream,
        continuous_usage=config.continuous_usage,
        temperature=None,  # each request has its own
        strict=True,
        # For random text at temperature 1 a model rarely ends at its first token; _empty says how often it may.
        allow_empty=not config.fixed_output,
        keep_text=not config.speed_only,
        records_path=folder / "requests.jsonl",
    )


def _run_levels(
    config: ThroughputConfig,
    plan: PromptPlan,
    folder: Path,
    model: str,
    generator: TextGenerator | None,
    on_progress: OnProgress | None,
) -> list[LevelResult]:
    level_records: list[list[RequestRecord]] = []
    load_settings = load_config(config, model, folder)
    results = run_levels(load_settings, on_progress, on_level=lambda _, records: level_records.append(records))
    # After the last level: counting tokens between two levels would let the server rest.
    for result, records, planned_requests in zip(results, level_records, plan.levels, strict=False):
        check_level(config, result, records, planned_requests, generator)
    return results


def _settings(config: ThroughputConfig) -> dict[str, object]:
    names = ("num_prompts", "input_len", "output_len", "reuse_prompts", "stream", "speed_only", "seed")
    settings = {name: getattr(config, name) for name in names}
    return {"what": "throughput", "levels": list(config.levels), "ignore_eos": config.fixed_output, **settings}


def _notes(config: ThroughputConfig, levels: Sequence[LevelResult]) -> list[str]:
    notes = []
    if config.speed_only:
        notes.append(
            "Speed only: token ids as prompts, end tokens ignored, no answer checked. The weighted throughput is no "
            "score."
        )
        if config.tokenizer is None and any(level.failed for level in levels):
            notes.append(f"Ids below {RANDOM_HIGH_ID:,} were sent; give the --tokenizer of a smaller vocabulary.")
    wide_levels = [str(level) for level in config.levels if level > config.num_prompts]
    if wide_levels:
        notes.append(
            f"--num-prompts {config.num_prompts} is fewer than the concurrency of the levels {', '.join(wide_levels)}: "
            f"they never had more than {config.num_prompts} in flight."
        )
    if config.reuse_prompts:
        notes.append("All levels used the same prompts: a prefix cache may have served them.")
    notes += [reason for level in levels if level.verdict == "OK" for reason in level.reasons]
    return notes


# --- checks of a level


def check_level(
    config: ThroughputConfig,
    result: LevelResult,
    records: Sequence[RequestRecord],
    planned_requests: Sequence[PlannedRequest],
    generator: TextGenerator | None,
) -> None:
    """Check the answers of a level and write the findings into `result`.

    The verdict becomes FAILED if an answer, a token count or a length is wrong.
    """
    complete_records = [record for record in records if record.failure is None]
    problems = _length_problems(config, complete_records, planned_requests) + _cache_problems(config, complete_records)
    if generator is not None and not config.speed_only:
        result.checks, answer_problems = _check_counts_and_answers(complete_records, planned_requests, generator)
        problems += answer_problems + _empty_answer_problems(complete_records)
        if result.checks.counts_agree:
            result.token_count_source = "confirmed"
    if problems:
        result.reasons += problems
        if result.verdict in SCORED:
            result.verdict = "FAILED"


def make_gates(config: ThroughputConfig, levels: Sequence[LevelResult]) -> list[CheckResult]:
    """Return one gate per kind of check over all planned levels. A level that did not run passes no gate."""
    num_missing = len(config.levels) - len(levels)
    num_sent = len(levels) * config.num_prompts
    num_complete = sum(level.succeeded for level in levels)
    missing_text = f"; {num_missing} levels did not run" if num_missing else ""
    answer_gate = CheckResult(
        name="every request answered completely",
        status="FAIL" if num_complete < num_sent or num_missing else "PASS",
        detail=f"{num_complete} of {num_sent}{missing_text}",
    )
    names = ("spot checks correct", "reported tokens agree with the tokenizer")
    if config.speed_only:
        return [answer_gate, *(CheckResult(name=name, status="NOT RUN", detail="--speed-only") for name in names)]
    checks = [level.checks for level in levels if level.checks is not None]
    num_correct, num_spot_checks = (
        sum(level_checks.spot_checks_correct for level_checks in checks),
        sum(level_checks.spot_checks for level_checks in checks),
    )
    num_agreeing = sum(level_checks.counts_agree for level_checks in checks)
    check_passed = (num_correct == num_spot_checks and not num_missing, num_agreeing == len(checks) and not num_missing)
    details = (
        f"{num_correct} of {num_spot_checks}{missing_text}",
        f"at {num_agreeing} of {len(checks)} levels{missing_text}",
    )
    return [
        answer_gate,
        *(
            CheckResult(name=name, status="PASS" if did_pass else "FAIL", detail=detail)
            for name, did_pass, detail in zip(names, check_passed, details, strict=True)
        ),
    ]


def _length_problems(
    config: ThroughputConfig, complete_records: Sequence[RequestRecord], planned_requests: Sequence[PlannedRequest]
) -> list[str]:
    """Return a problem if answers do not have the fixed output length. Shorter answers cost less to compute."""
    if not config.fixed_output:
        return []
    fixed_records = [record for record in complete_records if planned_requests[record.index].check is None]
    wrong_lengths = [record.output_tokens for record in fixed_records if record.output_tokens != config.output_len]
    if not wrong_lengths:
        return []
    return [
        f"{len(wrong_lengths)} of {len(fixed_records)} answers do not have {config.output_len} tokens "
        f"(one has {wrong_lengths[0]})"
    ]


def _cache_problems(config: ThroughputConfig, complete_records: Sequence[RequestRecord]) -> list[str]:
    """Return a problem if prompts came from the prefix cache.

    Such prompts are not computed, so the rate is too high.
    """
    num_cached, num_prompt_tokens = (
        sum(record.cached_tokens or 0 for record in complete_records),
        sum(record.prompt_tokens for record in complete_records),
    )
    if config.reuse_prompts or num_cached <= MAX_CACHED_RATIO * num_prompt_tokens:
        return []
    return [
        f"{num_cached:,} of {num_prompt_tokens:,} prompt tokens came from a prefix cache: this server has had the "
        f"prompts of --seed {config.seed} before; take another seed, or --reuse-prompts"
    ]


def _empty_answer_problems(complete_records: Sequence[RequestRecord]) -> list[str]:
    num_empty = sum(not record.text for record in complete_records)
    if num_empty <= max(1.0, MAX_EMPTY_RATIO * len(complete_records)):
        return []
    return [f"{num_empty} of {len(complete_records)} answers were an end token and nothing else"]


def _check_counts_and_answers(
    complete_records: Sequence[RequestRecord], planned_requests: Sequence[PlannedRequest], generator: TextGenerator
) -> tuple[LevelChecks, list[str]]:
    prompt_tokens = sum(generator.count(planned_requests[record.index].text or "") for record in complete_records)
    output_tokens = sum(map(generator.count_output_tokens, complete_records))
    reported_prompt = sum(record.prompt_tokens for record in complete_records)
    reported_output = sum(record.output_tokens for record in complete_records)
    problems = []
    if not _counts_agree(reported_prompt, prompt_tokens, MAX_TEMPLATE_TOKENS * len(complete_records)):
        problems.append(f"the server reports {reported_prompt} prompt tokens, the tokenizer counts {prompt_tokens}")
    if not _counts_agree(reported_output, output_tokens, 0):
        problems.append(f"the server reports {reported_output} output tokens, the tokenizer counts {output_tokens}")
    counts_agree = bool(complete_records) and not problems  # without an answer there is nothing to agree on
    num_spot_checks = sum(request.check is not None for request in planned_requests)
    checked_answers = [
        (check, record) for record in complete_records if (check := planned_requests[record.index].check) is not None
    ]
    wrong_answers = [
        f"spot check failed: {check.question} was answered {record.content[-80:]!r}, not {check.value}"
        for check, record in checked_answers
        if not check.passes(record.content)
    ]
    problems += wrong_answers[:1]
    num_correct = len(checked_answers) - len(wrong_answers)
    if num_correct < num_spot_checks and not wrong_answers:
        problems.append(f"{num_spot_checks - num_correct} of {num_spot_checks} spot checks got no answer")
    checks = LevelChecks(
        spot_checks=num_spot_checks,
        spot_checks_correct=num_correct,
        counted_prompt_tokens=prompt_tokens,
        counted_output_tokens=output_tokens,
        counts_agree=counts_agree,
        counted_content_tokens=sum(generator.count(record.content) for record in complete_records),
    )
    return checks, problems


def _counts_agree(num_reported: int, num_counted: int, max_extra: int) -> bool:
    tolerance = max(TOLERANCE_RATIO * num_counted, TOLERANCE_TOKENS)
    return num_counted - tolerance <= num_reported <= num_counted + max(max_extra, tolerance)
