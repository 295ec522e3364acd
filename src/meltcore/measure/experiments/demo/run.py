"""Run the demo: start the fleet, open its routes, ask problems of each task, load it at each level, stop it, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape

from meltcore.common.errors import MeltcoreError
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import (
    CheckResult,
    DemoSample,
    Evaluation,
    Fingerprint,
    FleetLevel,
    LevelResult,
    RunResult,
)
from meltcore.measure.documents.served_model import model_facts, model_notes
from meltcore.measure.documents.values.formatting import evaluation_line, format_duration, format_percent
from meltcore.measure.documents.values.progress import answer_progress, print_check
from meltcore.measure.documents.verdicts import Verdict
from meltcore.measure.experiments.demo.clients import check_installed, open_routes
from meltcore.measure.experiments.demo.config import CHAT, MIX, DemoConfig
from meltcore.measure.experiments.demo.fleet import (
    FILE_NAME,
    LOG_NAME,
    chat_model_name,
    fleet_server,
    models_by_task,
    write_fleet,
)
from meltcore.measure.experiments.demo.steps import converse, run_step, speak
from meltcore.measure.experiments.demo.verdict import judge, passed
from meltcore.measure.experiments.evals.conformance import run_checks
from meltcore.measure.experiments.evals.run import evaluate
from meltcore.measure.experiments.servers.api import Api
from meltcore.measure.experiments.servers.process import MeltcoreServer
from meltcore.measure.load.fleet.fleet_config import FleetLoadConfig
from meltcore.measure.load.fleet.fleet_run import measure_fleet
from meltcore.measure.load.fleet.fleet_streams import level_line, level_status
from meltcore.measure.load.tasks.task import MeasuredTask, Problem, tasks
from meltcore.measure.report.load.fleet_levels import mixed_tables
from meltcore.measure.report.load.levels import levels_tables
from meltcore.measure.report.load.run import all_levels
from meltcore.measure.report.page.console import print_table
from meltcore.measure.report.render import save_run

_EXIT_WAIT_S = 2.0


@dataclass
class _Measurements:
    """The measurements so far. All of them go into the result, even if the run fails."""

    fingerprint: Fingerprint
    models: dict[str, str] = field(default_factory=dict)  # by task
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[CheckResult] = field(default_factory=list)
    evaluation: Evaluation | None = None
    levels: list[LevelResult] = field(default_factory=list)
    samples: list[DemoSample] = field(default_factory=list)
    mixed: list[FleetLevel] = field(default_factory=list)
    read_back: LevelResult | None = None


def run_demo(config: DemoConfig, console: Console) -> tuple[RunFolder, RunResult]:
    """Run the demo and write the run folder. The server is always ended.

    An interruption or a failing server leaves a partial result that says so. Raises ProcessError if the server never
    became ready; its log stays in the run folder.
    """
    if config.clients:
        check_installed()
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    folder = RunFolder.create(config.out, "demo")
    measurements = _Measurements(take_fingerprint(config.arguments, config.seed))
    fleet = folder.path / FILE_NAME
    write_fleet(fleet, config.tasks, config.chat_model)
    ended_by: tuple[Verdict, str] | None = None

    def report(text: str) -> None:
        console.print(text, style="yellow", highlight=False)

    with fleet_server(fleet, folder.path / LOG_NAME, report=report) as server:
        try:
            with console.status("starting the fleet"):
                address = server.wait_ready()
            measurements.models = models_by_task(Api(address))
            console.print(f"serving {', '.join(measurements.models.values())} at {address}", highlight=False)
            _measure(config, console, server, Api(address), folder, measurements)
        except KeyboardInterrupt:
            ended_by = "PARTIAL", "interrupted"
        except MeltcoreError as error:
            if not measurements.checks:
                raise  # nothing was measured, so the error is all there is to report
            ended_by = ("SERVER_DIED" if server.ended_within(_EXIT_WAIT_S) else "FAILED"), str(error)
        with console.status("stopping the fleet"):
            server.stop()
    result = _result(config, measurements, ended_by, started, time.monotonic() - clock)
    save_run(folder, result)
    return folder, result


def print_outcome(console: Console, folder: RunFolder, result: RunResult) -> int:
    """Print the table, the verdict with every reason, and the path of the report; return the exit code."""
    for table in [*levels_tables(result.levels), *mixed_tables(result.mixed)]:
        print_table(table, console)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {escape(reason)}", highlight=False, soft_wrap=True)
    if passed(result.verdict):
        num_requests = sum(level.requests for level in all_levels(result))
        console.print(
            f"[green]passed[/]: all {num_requests:,} requests got their complete answer, "
            f"{format_percent(result.accuracy)} right unloaded, in {format_duration(result.duration_s)}",
            highlight=False,
            soft_wrap=True,
        )
    if result.verdict == "CLIENT_BOUND":
        console.print("[yellow]CLIENT_BOUND[/]: the load generator was at its limit and distorts the latencies")
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    return result.exit_code


def _measure(
    config: DemoConfig,
    console: Console,
    server: MeltcoreServer,
    api: Api,
    folder: RunFolder,
    measurements: _Measurements,
) -> None:
    """Run the checks, the problems of each task and the levels, and record each result in `measurements` immediately.

    Raises KeyboardInterrupt on Ctrl-C, and MeltcoreError if the server ends by itself.
    """
    model = measurements.models[CHAT]
    measurements.facts = model_facts(api.get("/v1/models").json(), model)
    _check(config, console, api, measurements)
    if config.chat_model is not None:
        _converse(console, api, chat_model_name(config.chat_model), measurements)
    with answer_progress(console) as on_answer:
        measurements.evaluation = evaluate(api, model, on_progress=on_answer)
    console.print(evaluation_line(measurements.evaluation), highlight=False)
    for task in tasks().values():
        if task.name in config.tasks:
            _measure_step(config, console, folder, measurements, task, server, api.address)
    _run_ladder(config, console, folder, measurements, server, api.address)


def _check(config: DemoConfig, console: Console, api: Api, measurements: _Measurements) -> None:
    """Check the API with Meltcore's own requests, then open every route with the clients that users have."""
    checks = measurements.checks = run_checks(api, measurements.models[CHAT])
    with TemporaryDirectory(prefix="meltcore-demo-") as uploads, console.status("opening the routes") as status:
        if config.clients:
            checks += open_routes(
                api.address, measurements.models, Path(uploads), lambda check: status.update(escape(check.name))
            )
    _print_checks(console, checks, "API checks passed")


def _converse(console: Console, api: Api, model: str, measurements: _Measurements) -> None:
    """Hold the conversations with the language model and print its first answer."""
    with console.status(f"talking with {model}"):
        checks, samples = converse(api, model)
    measurements.checks += checks
    measurements.samples += samples
    _print_checks(console, checks, f"conversations with {model} passed")
    for sample in samples[:1]:
        console.print(f"{sample.given} {sample.answer}", markup=False, highlight=False, soft_wrap=True)


def _print_checks(console: Console, checks: Sequence[CheckResult], what: str) -> None:
    """Print how many checks passed, and each that failed."""
    num_passed = sum(check.status == "PASS" for check in checks)
    console.print(f"{num_passed} of {len(checks)} {what}", highlight=False)
    for check in checks:
        if check.status == "FAIL":
            print_check(console, check)


def _measure_step(
    config: DemoConfig,
    console: Console,
    folder: RunFolder,
    measurements: _Measurements,
    task: MeasuredTask,
    server: MeltcoreServer,
    address: str,
) -> None:
    """Run a task's step. Raises KeyboardInterrupt on Ctrl-C, and MeltcoreError if the server has ended."""
    if task.step is not None:
        _load_step(task, task.step.make_problems(config.seed), console, folder, measurements, server, address)
    readers = [each for each in tasks().values() if task.read_back is not None and each.path == task.read_back.reader]
    if task.read_back is not None and readers and readers[0].name in config.tasks:
        with console.status("speaking texts, which the transcriber reads back"):
            texts = task.read_back.make_problems(config.seed)
            spoken = speak(address, measurements.models[task.name], task, texts)
        _load_step(readers[0], spoken, console, folder, measurements, server, address)
        measurements.read_back = measurements.levels[-1]


def _load_step(
    task: MeasuredTask,
    problems: Sequence[Problem],
    console: Console,
    folder: RunFolder,
    measurements: _Measurements,
    server: MeltcoreServer,
    address: str,
) -> None:
    model = measurements.models[task.name]
    with TemporaryDirectory(prefix="meltcore-demo-") as inputs:
        level, samples = run_step(task, problems, address, model, Path(inputs), folder.requests_path, console)
    measurements.levels.append(level)
    measurements.samples += samples
    if level.verdict == "PARTIAL":
        raise KeyboardInterrupt
    if level.failed and server.ended_within(_EXIT_WAIT_S):
        raise MeltcoreError(f"the server ended at {task.name}; its last lines:\n{server.log_tail()}")


def _run_ladder(
    config: DemoConfig,
    console: Console,
    folder: RunFolder,
    measurements: _Measurements,
    server: MeltcoreServer,
    address: str,
) -> None:
    """Load all models together at each level. A refused request is sent again after the time in Retry-After.

    Raises KeyboardInterrupt on Ctrl-C, and MeltcoreError if the server has ended.
    """
    load = FleetLoadConfig(
        url=address,
        parts=("mixed",),
        levels=config.levels,
        mix=MIX,
        models=tuple(measurements.models.values()),
        level_s=config.level_s,
        seed=config.seed,
    )

    def on_level(level: FleetLevel) -> None:
        measurements.mixed.append(level)
        console.print(level_line(level), markup=False, highlight=False, soft_wrap=True)

    with level_status(console) as on_progress:
        result = measure_fleet(
            load, config.arguments, records_path=folder.requests_path, on_progress=on_progress, on_level=on_level
        )
    if result.status == "partial" and not server.ended_within(_EXIT_WAIT_S):
        raise KeyboardInterrupt  # the load generator handled it to end the level in order
    if result.status == "partial":
        label = measurements.mixed[-1].label if measurements.mixed else "the first level"
        raise MeltcoreError(f"the server ended at {label}; its last lines:\n{server.log_tail()}")


def _result(
    config: DemoConfig,
    measurements: _Measurements,
    ended_by: tuple[Verdict, str] | None,
    started: str,
    duration_s: float,
) -> RunResult:
    if ended_by is not None:
        verdict, reasons = ended_by[0], [ended_by[1]]
    elif measurements.evaluation is None:
        raise AssertionError("a complete run has asked the held-out problems")
    else:
        verdict, reasons = judge(
            measurements.checks,
            measurements.evaluation,
            measurements.levels,
            measurements.mixed,
            config.levels,
            measurements.read_back,
        )
    settings = {
        "model": ", ".join(measurements.models.values()),
        **measurements.facts,
        "models": measurements.models,
        "levels": list(config.levels),
        "level_s": config.level_s,
        "mix": {task: share for task, share in MIX.items() if task in measurements.models},
        "sampling": "greedy, streamed",
    }
    notes = [
        f"Server and load generator shared the {measurements.fingerprint.cores} cores of one machine "
        "and slowed each other."
    ]
    if config.chat_model is None:
        notes.append(
            "No language model with real weights was served: `make demo` fetches one, and --chat-model names one."
        )
    return RunResult(
        command="demo",
        status="complete" if ended_by is None else "partial",
        started=started,
        duration_s=duration_s,
        fingerprint=measurements.fingerprint,
        settings=settings,
        accuracy=measurements.evaluation.accuracy if measurements.evaluation else None,
        evaluation=measurements.evaluation,
        checks=measurements.checks,
        levels=measurements.levels,
        mixed=measurements.mixed,
        samples=measurements.samples,
        verdict=verdict,
        reasons=reasons,
        notes=model_notes(measurements.facts) + notes,
    )
