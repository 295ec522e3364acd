"""Runs the full evaluation of one server: conformance, GSM8K, throughput and the score, as one result.

Another server (vLLM, SGLang ...) is started by a command from another environment. A failed conformance check fails the
run but does not change the score, which depends on GSM8K and the levels only.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.measure.documents.fingerprint import clean_arguments
from meltcore.measure.documents.runfolder import RunFolder, read_result
from meltcore.measure.documents.schema import CheckResult, EvalScore, LevelResult, RunResult
from meltcore.measure.documents.values.formatting import format_load
from meltcore.measure.documents.values.progress import answer_progress, print_check, warning_printer
from meltcore.measure.documents.verdicts import CUT_SHORT, SCORED, Verdict, worst_verdict
from meltcore.measure.documents.weights import missing_concurrencies, weighted_sum
from meltcore.measure.experiments.evals import gsm8k
from meltcore.measure.experiments.evals.config import GSM8K_LIMIT, LEVELS, EvaluationConfig
from meltcore.measure.experiments.evals.gsm8k_data import read_items, read_shots
from meltcore.measure.experiments.evals.run import run_eval
from meltcore.measure.experiments.evals.throughput import TextGenerator, run_throughput
from meltcore.measure.experiments.servers import START_LIMIT_S, Api, ServerProcess, accepts_connections

EvaluationMode = Literal["all", "baseline", "score"]
# Settings of published scores; a score with another value is not comparable with them.
PUBLISHED_SETTINGS: dict[str, Any] = {
    "limit": GSM8K_LIMIT,
    "levels": list(LEVELS),
    "num_prompts": 64,
    "input_len": 1024,
    "output_len": 1024,
    "ignore_eos": False,
}
SERVER_LOG = "server.log"
_SETTLE_S = 2.0  # a command that only starts its server in the background ends within this after that is ready
# They point at our packages, which another environment's Python must not find.
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def check_config(config: EvaluationConfig) -> None:
    """Raise ConfigError if the data, the examples or the tokenizer cannot be read.

    Call it before the evaluation starts.
    """
    if not config.throughput.speed_only:
        read_items(config.data, config.limit)
        read_shots(config.shots)
    if config.throughput.tokenizer is not None:
        TextGenerator(config.throughput.tokenizer)


def run_evaluation(
    config: EvaluationConfig,
    folder: Path,
    console: Console,
    arguments: Sequence[str] = (),
    mode: EvaluationMode = "all",
) -> RunResult:
    """Evaluate the server of `config` and return the result. Prompts and records are written into `folder`.

    An interruption, or a server that dies during the run, leaves a partial result that says so. Raises ConfigError if
    nothing could be measured; `check_config` detects most such settings beforehand.
    """
    parts: list[RunResult] = []
    early_end: tuple[Verdict, str] | None = None
    try:
        for part in _run_parts(config, folder, console, arguments):
            parts = [*parts, part]
    except (KeyboardInterrupt, MeltcoreError) as error:
        if not parts:
            raise
        early_end = ("FAILED", str(error)) if isinstance(error, MeltcoreError) else ("PARTIAL", "interrupted")
    result = combine(mode, parts)
    speed_only = config.throughput.speed_only
    if speed_only:
        result.gates.insert(0, gsm8k.gate_not_run(config.limit, "--speed-only"))
    if early_end is not None:
        result.status, result.verdict = "partial", worst_verdict((result.verdict, early_end[0]), "PARTIAL")
        result.reasons.append(early_end[1])
    elif not speed_only and config.missing_levels:
        result.notes.append(f"No score without the levels {config.missing_levels}; it takes all of {list(LEVELS)}.")
    elif not speed_only and result.status == "complete":
        result.eval_score = score(result.gates, result.levels)
    return result


def score(gates: Sequence[CheckResult], levels: Sequence[LevelResult]) -> EvalScore:
    """Return the weighted sum of the throughput at concurrency 1 to 64. A failed gate or level makes it zero.

    Raises ConfigError if a level is missing or incomplete, or if a gate did not run. Such runs have no score.
    """
    skipped_gates = [gate.name for gate in gates if gate.status == "NOT RUN"]
    if skipped_gates or not gates:
        raise ConfigError(f"no score without its gates: {', '.join(skipped_gates) or 'none'} NOT RUN")
    missing_levels = missing_concurrencies([level for level in levels if level.verdict not in CUT_SHORT])
    if missing_levels:
        raise ConfigError(f"no score without the levels {missing_levels}; it takes all of {list(LEVELS)}")
    zero_reasons = [f"{gate.name}: {gate.detail}" for gate in gates if gate.status == "FAIL"]
    zero_reasons += [f"{format_load(level)}: {level.verdict}" for level in levels if level.verdict not in SCORED]
    if zero_reasons:
        return EvalScore(total_tokens_per_s=0.0, output_tokens_per_s=0.0, zero_reasons=zero_reasons)
    return EvalScore(
        total_tokens_per_s=weighted_sum(levels, "total_tokens_per_s"),
        output_tokens_per_s=weighted_sum(levels, "output_tokens_per_s"),
    )


def score_runs(folders: Sequence[Path | str]) -> RunResult:
    """Return one result with the score of a full run, or of a GSM8K run and a throughput run.

    Raises ConfigError if `folders` hold neither.
    """
    parts = [read_result(folder) for folder in folders]
    for part, folder in zip(parts, folders, strict=True):
        if part.command != "eval" or part.settings.get("what") == "problems":
            raise ConfigError(f"{folder} is not a run of eval gsm8k, throughput, all or baseline")
        if part.status == "partial":
            raise ConfigError(f"{folder} is a partial run: {'; '.join(part.reasons) or part.verdict}")
    models = {str(part.settings.get("model")) for part in parts}
    if len(models) > 1:
        raise ConfigError(f"these are runs of different models: {', '.join(sorted(models))}")
    if sum(bool(part.levels) for part in parts) > 1 or sum(part.evaluation is not None for part in parts) > 1:
        raise ConfigError("two of these runs measured the same; give one of gsm8k and one of throughput, or a full one")
    result = combine("score", parts)
    if result.evaluation is None:
        raise ConfigError("no score without GSM8K; give a run of it as well")
    result.eval_score = score(result.gates, result.levels)
    return result


def combine(mode: EvaluationMode, parts: Sequence[RunResult]) -> RunResult:
    """Return one result that combines the results `parts`. The parts must be different evaluations."""
    settings: dict[str, Any] = {"what": mode}
    # "what" and "min_accuracy" do not describe the whole.
    for part in parts:
        settings |= {name: value for name, value in part.settings.items() if name not in ("what", "min_accuracy")}
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
        weighted_throughput=next(
            (part.weighted_throughput for part in parts if part.weighted_throughput is not None), None
        ),
        verdict=worst_verdict((part.verdict for part in parts), "PARTIAL"),
        reasons=[reason for part in parts for reason in part.reasons],
        notes=list(dict.fromkeys([note for part in parts for note in part.notes] + _difference_notes(settings))),
    )


def _run_parts(
    config: EvaluationConfig, folder: Path, console: Console, arguments: Sequence[str]
) -> Iterator[RunResult]:
    throughput_config = config.throughput
    yield run_eval(
        throughput_config.url,
        "conformance",
        model=throughput_config.model,
        api_key=throughput_config.api_key,
        arguments=arguments,
        on_check=lambda check: print_check(console, check),
    )
    if not throughput_config.speed_only:
        with answer_progress(console, description="GSM8K") as on_answer:
            yield gsm8k.run_gsm8k(
                throughput_config.url,
                config,
                model=throughput_config.model,
                api_key=throughput_config.api_key,
                arguments=arguments,
                on_answer=on_answer,
                folder=folder,
            )
    yield run_throughput(throughput_config, folder, arguments, console)


def _difference_notes(settings: dict[str, Any]) -> list[str]:
    """Return a list with one note on the settings that differ from the settings of published scores.

    Returns an empty list if no setting differs.
    """
    if settings.get("speed_only"):
        return []
    differences = [
        f"{name} {settings[name]} instead of {published}"
        for name, published in PUBLISHED_SETTINGS.items()
        if name in settings and settings[name] != published
    ]
    return (
        [f"Measured with {', '.join(differences)}: a score of it is not comparable with published ones."]
        if differences
        else []
    )


def run_baseline(
    config: EvaluationConfig,
    command: str,
    folder: Path,
    console: Console,
    arguments: Sequence[str] = (),
    start_timeout_s: float = START_LIMIT_S,
) -> RunResult:
    """Start `command`, wait until the server of `config` is ready, evaluate it, and end its process group.

    The result is returned. It is also written into `folder` before the server is ended, which can take a while.

    Raises ConfigError if a server already answers at the address, or if `command` leaves its server in the background.
    Raises ProcessError if the server does not become ready in time.
    """
    argv = _split_command(command)
    url, api_key = config.throughput.url, config.throughput.api_key
    Api(url, api_key=api_key)  # raises now for a malformed address or key
    if accepts_connections(url):
        raise ConfigError(f"a server answers at {url} already: it would be measured instead of the baseline's")
    report = warning_printer(console)
    environment = {name: value for name, value in os.environ.items() if name not in _PYTHON_VARIABLES}
    command_text = shlex.join(clean_arguments(argv))
    result: RunResult | None = None
    try:
        with ServerProcess(
            argv, folder / SERVER_LOG, report=report, url=url, api_key=api_key, environment=environment
        ) as server:
            with console.status(f"waiting for {argv[0]} to be ready at {url}"):
                server.wait_ready(ready_limit_s=start_timeout_s, settle_s=_SETTLE_S)
            result = run_evaluation(config, folder, console, arguments, "baseline")
            result.settings["server_command"] = command_text
            RunFolder(folder).write_result(result)
            # A second Ctrl-C takes effect when the server has ended, and there is nothing left to interrupt.
            with console.status("ending the server"), suppress(KeyboardInterrupt):
                server.stop()
    finally:
        if accepts_connections(url):
            warning = f"A server still answers at {url} after {command_text} was ended: end it yourself."
            if result is None:
                report(warning)
            else:
                result.notes.append(warning)
    return result


def _split_command(command: str) -> list[str]:
    try:
        argv = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--command {command!r} cannot be parsed: {error}") from error
    if not argv:
        raise ConfigError("--command is empty; give the command that starts the server")
    if "=" in argv[0]:
        raise ConfigError(f"--command is run without a shell, which would set {argv[0]}; write env {argv[0]} ...")
    return argv
