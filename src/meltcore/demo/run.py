"""Run the demo: start our server, check it, ask held-out problems, load it at each level, stop it, report."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress as Bars
from rich.progress import TaskID

from meltcore.demo.config import DemoConfig
from meltcore.demo.tasks import Problem, TaskStep, run_step, speak, task_steps
from meltcore.demo.verdict import judge, passed
from meltcore.errors import MeltcoreError
from meltcore.evals.api import Api
from meltcore.evals.conformance import run_checks
from meltcore.evals.run import evaluate
from meltcore.evals.server_process import ServerProcess
from meltcore.load.config import LoadConfig
from meltcore.load.runner import Progress, run_levels
from meltcore.report.console import print_table
from meltcore.report.render import save_run
from meltcore.report.run import levels_tables
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.formatting import evaluation_line, format_duration, format_load, format_percent
from meltcore.results.progress import answer_progress, print_check, progress_bar
from meltcore.results.runfolder import RunFolder
from meltcore.results.schema import CheckResult, Evaluation, Fingerprint, LevelResult, RunResult, Sample, Verdict
from meltcore.results.served_model import model_facts, model_notes

SERVER_COMMAND = (sys.executable, "-m", "meltcore.cli.main")
SERVER_LOG = "server.log"
LISTEN_LIMIT_S = 60.0
READY_LIMIT_S = 180.0
MIN_REQUESTS = 200  # so that a level's accuracy compares with that of the 200 unloaded problems
SHORT_PROBLEMS_FROM = 1_000  # concurrency from which problems are short: the level tests requests, not tokens
EXIT_PASSED, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130
_EXIT_WAIT_S = 2.0
_BANNER = re.compile(r"^meltcore: listening on (http://\S+)", re.MULTILINE)


class DemoServer(ServerProcess):
    """A `meltcore serve` on a port that the system chooses. A context manager: the server has ended after the block."""

    def __init__(self, arguments: Sequence[str], log_path: Path, *, report: Callable[[str], None]) -> None:
        super().__init__([*SERVER_COMMAND, "serve", *arguments, "--port", "0"], log_path, report=report)

    def wait_ready(self, *, listen_limit_s: float = LISTEN_LIMIT_S, ready_limit_s: float = READY_LIMIT_S) -> str:
        """Return the address once /health answers 200. Raises ProcessError past the limits or where it ends first."""
        address = self.wait_for(self._address, listen_limit_s, "print its address")
        self.wait_healthy(address, ready_limit_s)
        return address

    def _address(self) -> str | None:
        match = _BANNER.search(self.log)
        return match[1] if match else None


@dataclass
class _Measurements:
    """The measurements so far. All of them go into the result, even if the run fails."""

    fingerprint: Fingerprint
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[CheckResult] = field(default_factory=list)
    evaluation: Evaluation | None = None
    levels: list[LevelResult] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    spoken: list[Problem] = field(default_factory=list)
    read_back: LevelResult | None = None


def run_demo(config: DemoConfig, console: Console) -> tuple[RunFolder, RunResult]:
    """Run everything and write the run folder; the server always ends.

    An interruption or a failing server leaves a partial result that says so. Raises ProcessError where the server never
    became ready; its log stays in the run folder.
    """
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    folder = RunFolder.create(config.out, "demo")
    measurements = _Measurements(take_fingerprint(config.arguments, config.seed))

    def report(text: str) -> None:
        console.print(text, style="yellow", highlight=False)

    def serve(model: str, log_name: str, measure: Callable[[DemoServer, str], None]) -> tuple[Verdict, str] | None:
        """Measure a server of `model`; return what ended it early, None where nothing did."""
        with DemoServer([model], folder.path / log_name, report=report) as server:
            try:
                with console.status(f"starting a server with {model}"):
                    address = server.wait_ready()
                console.print(f"serving {model} at {address}", highlight=False)
                measure(server, address)
            except KeyboardInterrupt:
                return "PARTIAL", "interrupted"
            except MeltcoreError as error:
                if not measurements.checks:
                    raise  # nothing was measured, so the error is all there is to report
                return "SERVER_DIED" if server.ended_within(_EXIT_WAIT_S) else "FAILED", str(error)
            with console.status("stopping the server"):
                server.stop()
        return None

    ended_by = serve(
        config.model,
        SERVER_LOG,
        lambda server, address: _measure(config, console, server, Api(address), folder, measurements),
    )
    for step in task_steps(config):
        if ended_by is None:
            ended_by = serve(
                step.model, step.log_name, partial(_measure_step, config, console, folder, measurements, step)
            )
    result = _result(config, measurements, ended_by, started, time.monotonic() - clock)
    save_run(folder, result)
    return folder, result


def print_outcome(console: Console, folder: RunFolder, result: RunResult) -> int:
    """Print the table, the verdict with every reason, and the path of the report; return the exit code."""
    for table in levels_tables(result.levels):
        print_table(table, console)
    for reason in result.reasons:
        console.print(f"[red]{result.verdict}[/]: {escape(reason)}", highlight=False, soft_wrap=True)
    if passed(result.verdict):
        num_requests = sum(level.requests for level in result.levels)
        console.print(
            f"[green]passed[/]: all {num_requests:,} requests got their complete answer, "
            f"{format_percent(result.accuracy)} right unloaded, in {format_duration(result.duration_s)}",
            highlight=False,
            soft_wrap=True,
        )
    if result.verdict == "CLIENT_BOUND":
        console.print("[yellow]CLIENT_BOUND[/]: the load generator was at its limit and distorts the latencies")
    console.print(f"report: {folder.report_path}", highlight=False, soft_wrap=True)
    if result.verdict == "PARTIAL":
        return EXIT_INTERRUPTED
    return EXIT_PASSED if passed(result.verdict) else EXIT_FAILED


def _measure(
    config: DemoConfig, console: Console, server: DemoServer, api: Api, folder: RunFolder, measurements: _Measurements
) -> None:
    """Run checks, held-out problems and levels, and record each finding in `measured` immediately.

    Raises KeyboardInterrupt when interrupted, MeltcoreError where the server ends by itself.
    """
    model = api.resolve_model()[0]
    measurements.facts = model_facts(api.get("/v1/models").json(), model)
    measurements.checks = run_checks(api, model)
    num_passed = sum(check.status == "PASS" for check in measurements.checks)
    console.print(f"{num_passed} of {len(measurements.checks)} API checks passed", highlight=False)
    for check in measurements.checks:
        if check.status == "FAIL":
            print_check(console, check)
    with answer_progress(console) as on_answer:
        measurements.evaluation = evaluate(api, model, on_progress=on_answer)
    console.print(evaluation_line(measurements.evaluation), highlight=False)
    for concurrency in config.levels:
        level = _run_level(api.address, model, concurrency, config.seed, folder.requests_path, console)
        measurements.levels.append(level)
        if level.verdict == "PARTIAL":  # the load generator handled the Ctrl-C to end the level in order
            raise KeyboardInterrupt
        if level.failed and server.ended_within(_EXIT_WAIT_S):
            raise MeltcoreError(f"the server ended at {format_load(level)}; its last lines:\n{server.log_tail()}")


def _measure_step(
    config: DemoConfig,
    console: Console,
    folder: RunFolder,
    measurements: _Measurements,
    step: TaskStep,
    server: DemoServer,
    address: str,
) -> None:
    """Run a step after chat. Raises KeyboardInterrupt when interrupted, MeltcoreError where the server ended."""
    problems = step.make_problems(config.seed)
    _load_step(step, problems, console, folder, measurements, server, address)
    if step.task == "synthesis":
        measurements.spoken = speak(address, problems)
    if step.task == "recognition" and measurements.spoken:
        _load_step(step, measurements.spoken, console, folder, measurements, server, address)
        measurements.read_back = measurements.levels[-1]


def _load_step(
    step: TaskStep,
    problems: Sequence[Problem],
    console: Console,
    folder: RunFolder,
    measurements: _Measurements,
    server: DemoServer,
    address: str,
) -> None:
    with TemporaryDirectory(prefix="meltcore-demo-") as inputs, progress_bar(console) as bars:
        task = bars.add_task(step.task, total=len(problems), note="")
        level, samples = run_step(
            step, problems, address, Path(inputs), folder.requests_path, lambda progress: _show(bars, task, progress)
        )
    measurements.levels.append(level)
    measurements.samples += samples
    if level.verdict == "PARTIAL":
        raise KeyboardInterrupt
    if level.failed and server.ended_within(_EXIT_WAIT_S):
        raise MeltcoreError(f"the server of {step.task} ended; its last lines:\n{server.log_tail()}")


def _run_level(
    address: str, model: str, concurrency: int, seed: int, records_path: Path, console: Console
) -> LevelResult:
    """Run one level of held-out problems, all released together, with a progress bar."""
    num_requests = max(MIN_REQUESTS, concurrency)
    config = LoadConfig(
        url=address,
        model=model,
        concurrency=(concurrency,),
        num_prompts=(num_requests,),
        workload=_workload(concurrency),
        seed=seed + concurrency,  # different problems at each level
        records_path=records_path,
    )
    with progress_bar(console) as bars:
        task = bars.add_task(f"concurrency {concurrency:,}", total=num_requests, note="")
        [level] = run_levels(config, lambda progress: _show(bars, task, progress))
    return level


def _workload(concurrency: int) -> str:
    return "problems:short" if concurrency >= SHORT_PROBLEMS_FROM else "problems:mixed"


def _show(bars: Bars, task: TaskID, progress: Progress) -> None:
    if progress.phase == "warm-up":
        bars.update(task, note="warming up")
        return
    if progress.phase == "connecting":
        bars.update(task, note=f"{progress.num_connections:,} connected")
        return
    failed = f", [red]{progress.num_failed:,} failed[/]" if progress.num_failed else ""
    bars.update(task, completed=progress.num_done, note=f"{progress.in_flight:,} in flight{failed}")


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
            measurements.checks, measurements.evaluation, measurements.levels, config.levels, measurements.read_back
        )
    settings = {
        "model": config.model,
        **measurements.facts,
        "translator": config.translator,
        "synthesizer": config.synthesizer,
        "recognizer": config.recognizer,
        "levels": list(config.levels),
        "workloads": {f"{concurrency:,}": _workload(concurrency) for concurrency in config.levels},
        "sampling": "greedy, streamed",
    }
    notes = [
        f"Server and load generator shared the {measurements.fingerprint.cores} cores of one machine "
        "and slowed each other."
    ]
    if len({_workload(concurrency) for concurrency in config.levels}) > 1:
        notes.append(
            f"Levels of {SHORT_PROBLEMS_FROM:,} and more ask short problems. Those below ask mixed ones, some with "
            f"pages of facts, which cost far more per request."
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
        samples=measurements.samples,
        verdict=verdict,
        reasons=reasons,
        notes=model_notes(measurements.facts) + notes,
    )
