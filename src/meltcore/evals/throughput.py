"""One run of `meltcore eval URL throughput`: the levels by the load generator, their checks, the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from meltcore.evals.api import Api
from meltcore.evals.score import speed_sum
from meltcore.evals.throughput_checks import check_level, gates
from meltcore.evals.throughput_plan import WARMUPS, Plan, ThroughputConfig, make_plan
from meltcore.evals.throughput_prompts import HIGH_ID, TextMaker
from meltcore.load.config import LoadConfig
from meltcore.load.record import Record
from meltcore.load.run import overall_verdict
from meltcore.load.runner import OnProgress, run_levels
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.schema import Gate, LevelResult, RunResult
from meltcore.results.served import model_notes

PROMPTS_FILE = "prompts.jsonl"


def run_throughput(
    config: ThroughputConfig,
    folder: Path,
    arguments: Sequence[str] = (),
    on_progress: OnProgress | None = None,
    say: Callable[[str], None] | None = None,
) -> RunResult:
    """Prepare every prompt, then run the levels; prompts and records are written into `folder`.

    `say` is told that prompts are being made, which takes seconds with some tokenizers.

    FAILED where a request, a spot check, a token count or a fixed length is wrong at any level. Raises ConfigError
    where the run cannot start.
    """
    api = Api(config.url, api_key=config.api_key)
    model, facts = api.served(config.model)
    maker = None if config.tokenizer is None else TextMaker(config.tokenizer)
    if say is not None:
        prompts = (WARMUPS + config.requests) * len(config.levels)
        say(f"making {prompts:,} prompts of {config.input_tokens:,} tokens")
    plan = make_plan(config, maker)
    plan.write(folder / PROMPTS_FILE)
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    levels = _run_levels(config, plan, folder, model, maker, on_progress)
    verdict = overall_verdict(levels)
    found = gates(config, levels)
    return RunResult(
        command="eval",
        status="partial" if verdict in ("PARTIAL", "SERVER_DIED") else "complete",
        started=started,
        duration_s=time.monotonic() - clock,
        fingerprint=take_fingerprint(arguments, config.seed),
        settings=_settings(config) | {"model": model} | facts,
        gates=found,
        levels=levels,
        speed_sum=speed_sum(levels) if config.speed_only else None,
        verdict=verdict,
        reasons=_reasons(found),
        notes=[*_notes(config, levels), *model_notes(facts)],
    )


def _run_levels(
    config: ThroughputConfig,
    plan: Plan,
    folder: Path,
    model: str,
    maker: TextMaker | None,
    on_progress: OnProgress | None,
) -> list[LevelResult]:
    over: list[list[Record]] = []
    load = load_config(config, model, folder)
    results = run_levels(load, on_progress, on_level=lambda _, records: over.append(records))
    # After the last level: counting a level's tokens between two levels would let the server rest.
    for result, records, planned in zip(results, over, plan.levels, strict=False):
        check_level(config, result, records, planned, maker)
    return results


def load_config(config: ThroughputConfig, model: str, folder: Path) -> LoadConfig:
    """What the load generator is told; its levels, requests and warm-ups are those of the plan."""
    return LoadConfig(
        url=config.url,
        concurrency=config.levels,
        requests=config.requests,
        warmup=WARMUPS,
        workload=str(folder / PROMPTS_FILE),
        model=model,
        api_key=config.api_key,
        seed=config.seed,
        stream=config.stream,
        continuous_usage=config.continuous_usage,
        temperature=None,  # each request has its own
        # Asked random text at temperature 1 a model ends at once now and then; throughput_checks.py says how often.
        may_be_empty=not (config.fixed_output or config.speed_only),
        keep_text=not config.speed_only,
        records_path=folder / "requests.jsonl",
    )


def _settings(config: ThroughputConfig) -> dict[str, object]:
    return {
        "what": "throughput",
        "levels": list(config.levels),
        "requests": config.requests,
        "input_tokens": config.input_tokens,
        "output_tokens": config.output_tokens,
        "fixed_output": config.fixed_output or config.speed_only,
        "reuse_prompts": config.reuse_prompts,
        "stream": config.stream,
        "speed_only": config.speed_only,
        "seed": config.seed,
    }


def _reasons(found: Sequence[Gate]) -> list[str]:
    return [f"gate failed: {gate.name}: {gate.detail}" for gate in found if gate.status == "FAIL"]


def _notes(config: ThroughputConfig, levels: Sequence[LevelResult]) -> list[str]:
    notes = []
    if config.speed_only:
        notes.append("Speed only: token ids in, end tokens ignored, no answer checked. Its speed sum is no score.")
        if config.tokenizer is None and any(level.failed for level in levels):
            notes.append(f"Ids below {HIGH_ID:,} were sent; for a vocabulary that is smaller give its --tokenizer.")
    if config.reuse_prompts:
        notes.append("All levels share the same prompts: a prefix cache may have answered for the model.")
    notes += [reason for level in levels if level.verdict == "OK" for reason in level.reasons]
    return notes
