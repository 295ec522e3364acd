"""The whole evaluation of one server: conformance, GSM8K, throughput and the score, in that order, as one result.

A failed conformance check fails the run and leaves the score as it is: the score's rules know GSM8K and the levels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from meltcore.errors import ConfigError, MeltcoreError
from meltcore.evals import gsm8k
from meltcore.evals.gsm8k_data import DATASET, read_items, read_shots
from meltcore.evals.gsm8k_run import run_gsm8k
from meltcore.evals.problems import CONCURRENCY
from meltcore.evals.run import run_eval
from meltcore.evals.score import score
from meltcore.evals.throughput import load_config, run_throughput
from meltcore.evals.throughput_plan import ThroughputConfig
from meltcore.evals.throughput_prompts import TextMaker
from meltcore.load.console import level_bars
from meltcore.load.run import gravest
from meltcore.results.progress import answers_bar, print_check, quietly
from meltcore.results.runfolder import read_result
from meltcore.results.schema import RunResult, Verdict
from meltcore.results.weights import WEIGHTS, missing_loads

What = Literal["all", "baseline", "score"]
# What scores are published with; another value makes a score that compares with none of them.
PUBLISHED: dict[str, Any] = {
    "limit": gsm8k.LIMIT,
    "levels": list(WEIGHTS),
    "requests": 64,
    "input_tokens": 1024,
    "output_tokens": 1024,
    "fixed_output": False,
}
_OF_ONE_PART = ("what", "at_least")  # settings that say nothing of the whole


@dataclass(frozen=True, kw_only=True)
class WholeConfig:
    """`throughput` says which server; its speed_only leaves GSM8K out, and with it the score."""

    throughput: ThroughputConfig
    data: str = DATASET
    shots: str | None = None
    limit: int = gsm8k.LIMIT
    concurrency: int = CONCURRENCY

    def check(self) -> None:
        """Find out now, not after an hour, what cannot work. Raises ConfigError."""
        missing = [load for load in WEIGHTS if load not in self.throughput.levels]
        if missing:
            raise ConfigError(f"no score without the levels {missing}; it takes all of {list(WEIGHTS)}")
        if not self.throughput.speed_only:
            read_items(self.data, self.limit)
            read_shots(self.shots)
        if self.throughput.tokenizer is not None:
            TextMaker(self.throughput.tokenizer)


def run_whole(
    config: WholeConfig, folder: Path, console: Console, arguments: Sequence[str] = (), what: What = "all"
) -> RunResult:
    """Evaluate the server of `config`; prompts and records are written into `folder`.

    An interruption, or a server that is gone half way, leaves a partial result that says so. Raises ConfigError where
    nothing could be measured; `config.check()` finds out beforehand what cannot work.
    """
    parts: list[RunResult] = []
    ended_by: tuple[Verdict, str] | None = None
    try:
        for part in _run_parts(config, folder, console, arguments):
            parts.append(part)
    except KeyboardInterrupt:
        if not parts:
            raise
        ended_by = ("PARTIAL", "interrupted")
    except MeltcoreError as error:
        if not parts:
            raise
        ended_by = ("FAILED", str(error))
    result = combine(what, parts)
    if config.throughput.speed_only:
        result.gates.insert(0, gsm8k.gate_not_run(config.limit, "--speed-only"))
    if ended_by is not None:
        result.status, result.verdict = "partial", gravest((result.verdict, ended_by[0]))
        result.reasons.append(ended_by[1])
    elif not config.throughput.speed_only and result.status == "complete":
        result.eval_score = score(result.gates, result.levels)
    return result


def score_runs(folders: Sequence[Path | str]) -> RunResult:
    """The score of runs that were made one by one, or of a whole one. Raises ConfigError where they make none."""
    parts = [read_result(folder) for folder in folders]
    for part, folder in zip(parts, folders, strict=True):
        if part.command != "eval" or part.settings.get("what") == "problems":
            raise ConfigError(f"{folder} is no run of eval gsm8k, throughput, all or baseline")
        if part.status == "partial":
            raise ConfigError(f"{folder} is a partial run: {'; '.join(part.reasons) or part.verdict}")
    models = {str(part.settings.get("model")) for part in parts}
    if len(models) > 1:
        raise ConfigError(f"these are runs of different models: {', '.join(sorted(models))}")
    if sum(bool(part.levels) for part in parts) > 1 or sum(part.evaluation is not None for part in parts) > 1:
        raise ConfigError(
            "two of these runs measured the same; give one of gsm8k and one of throughput, or a whole one"
        )
    result = combine("score", parts)
    if result.evaluation is None:
        raise ConfigError("no score without GSM8K; give a run of it as well")
    if missing := missing_loads(result.levels):
        raise ConfigError(f"no score without the levels {missing}; it takes all of {list(WEIGHTS)}")
    result.eval_score = score(result.gates, result.levels)
    return result


def combine(what: What, parts: Sequence[RunResult]) -> RunResult:
    """One result that holds what each of `parts` holds; no two of them hold the same."""
    settings: dict[str, Any] = {"what": what}
    for part in parts:
        settings |= {name: value for name, value in part.settings.items() if name not in _OF_ONE_PART}
    return RunResult(
        command="eval",
        status="complete" if all(part.status == "complete" for part in parts) else "partial",
        started=min(part.started for part in parts),
        duration_s=sum(part.duration_s for part in parts),
        fingerprint=max(parts, key=lambda part: len(part.levels)).fingerprint,  # that of the levels has the seed
        settings=settings,
        accuracy=next((part.accuracy for part in parts if part.accuracy is not None), None),
        evaluation=next((part.evaluation for part in parts if part.evaluation is not None), None),
        checks=[check for part in parts for check in part.checks],
        gates=[gate for part in parts for gate in part.gates],
        levels=[level for part in parts for level in part.levels],
        speed_sum=next((part.speed_sum for part in parts if part.speed_sum is not None), None),
        verdict=gravest(part.verdict for part in parts),
        reasons=[reason for part in parts for reason in part.reasons],
        notes=list(dict.fromkeys([note for part in parts for note in part.notes] + _departures(settings))),
    )


def _run_parts(config: WholeConfig, folder: Path, console: Console, arguments: Sequence[str]) -> Iterator[RunResult]:
    of = config.throughput
    yield run_eval(
        of.url,
        "conformance",
        model=of.model,
        api_key=of.api_key,
        arguments=arguments,
        on_check=lambda check: print_check(console, check),
    )
    if not of.speed_only:
        with answers_bar(console, what="GSM8K") as on_answer:
            yield _run_gsm8k(config, folder, arguments, on_answer)
    with level_bars(load_config(of, "", folder).levels, console) as on_progress:
        yield run_throughput(of, folder, arguments, on_progress, quietly(console))


def _run_gsm8k(
    config: WholeConfig,
    folder: Path,
    arguments: Sequence[str],
    on_answer: Callable[[int, int, int], None] | None,
) -> RunResult:
    return run_gsm8k(
        config.throughput.url,
        data=config.data,
        shots=config.shots,
        limit=config.limit,
        model=config.throughput.model,
        api_key=config.throughput.api_key,
        concurrency=config.concurrency,
        arguments=arguments,
        on_answer=on_answer,
        folder=folder,
    )


def _departures(settings: dict[str, Any]) -> list[str]:
    """A note where something was measured otherwise than published scores are."""
    if settings.get("speed_only"):
        return []
    other = [
        f"{name} {settings[name]} instead of {published}"
        for name, published in PUBLISHED.items()
        if name in settings and settings[name] != published
    ]
    return [f"Measured with {', '.join(other)}: the score compares with no published one."] if other else []
