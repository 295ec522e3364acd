"""`meltcore demo`: start our server, check it, ask the held-out problems, load it at each level, stop it, report."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from meltcore.demo.gates import judge
from meltcore.demo.level import SHORT_FROM, run_level, workload_of
from meltcore.demo.server_process import OWN_PROGRAM, OwnServer
from meltcore.errors import ConfigError, MeltcoreError
from meltcore.evals import Api, evaluate, run_checks
from meltcore.report import save
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.progress import answers_bar, print_check
from meltcore.results.runfolder import RunFolder
from meltcore.results.schema import CheckResult, Evaluation, Fingerprint, LevelResult, RunResult, Verdict
from meltcore.results.served import model_facts, model_notes
from meltcore.results.wording import evaluation_line, load_of

DEFAULT_LEVELS = (10, 100, 400, 1_000, 10_000)
DEFAULT_MODEL = "meltcore/sums"
SERVER_LOG = "server.log"
_DEATH_S = 2.0


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """`levels`: concurrent requests of each level. `out`: the folder that run folders go to.

    `server_program` is what takes `serve MODEL --port 0`.
    """

    model: str = DEFAULT_MODEL
    levels: tuple[int, ...] = DEFAULT_LEVELS
    out: Path = Path("runs")
    seed: int = 0
    arguments: tuple[str, ...] = ()
    server_program: tuple[str, ...] = OWN_PROGRAM

    def __post_init__(self) -> None:
        if not self.levels or min(self.levels) < 1:
            raise ConfigError(f"levels must be numbers of at least 1; got {list(self.levels)}")
        if len(set(self.levels)) != len(self.levels):
            raise ConfigError(f"levels holds one twice: {list(self.levels)}")


@dataclass
class _Measured:
    """What is known so far: all of it goes into the result, however the run ends."""

    fingerprint: Fingerprint
    facts: dict[str, Any] = field(default_factory=dict)
    checks: list[CheckResult] = field(default_factory=list)
    evaluation: Evaluation | None = None
    levels: list[LevelResult] = field(default_factory=list)


def run_demo(config: DemoConfig, console: Console) -> tuple[RunFolder, RunResult]:
    """Run everything and write the run folder; the server is stopped whatever happens.

    An interruption or a server that fails half way leaves a partial result that says so. Raises ServerError where the
    server never became ready (its log stays in the run folder).
    """
    started, clock = datetime.now(UTC).isoformat(timespec="seconds"), time.monotonic()
    folder = RunFolder.create(config.out, "demo")
    measured = _Measured(take_fingerprint(config.arguments, config.seed))
    ended_by: tuple[Verdict, str] | None = None

    def say(text: str) -> None:
        console.print(text, style="yellow", highlight=False)

    with OwnServer([config.model], folder.path / SERVER_LOG, say=say, program=config.server_program) as server:
        try:
            with console.status(f"starting a server with {config.model}"):
                address = server.wait_ready()
            console.print(f"serving {config.model} at {address}", highlight=False)
            _measure(config, console, server, Api(address), folder, measured)
        except KeyboardInterrupt:
            ended_by = ("PARTIAL", "interrupted")
        except MeltcoreError as error:
            if not measured.checks:
                raise  # nothing was measured: the error says all there is to say
            ended_by = ("SERVER_DIED" if server.ended_within(_DEATH_S) else "FAILED", str(error))
        with console.status("stopping the server"):
            server.stop()
    result = _result(config, measured, ended_by, started, time.monotonic() - clock)
    save(folder, result)
    return folder, result


def _measure(
    config: DemoConfig, console: Console, server: OwnServer, api: Api, folder: RunFolder, measured: _Measured
) -> None:
    """Checks, held-out problems, levels; every finding goes into `measured` as soon as it is there.

    Raises KeyboardInterrupt when interrupted, MeltcoreError where the server ends by itself.
    """
    model = api.first_model()
    measured.facts = model_facts(api.get("/v1/models").json(), model)
    measured.checks = run_checks(api, model)
    _print_checks(console, measured.checks)
    with answers_bar(console) as on_answer:
        measured.evaluation = evaluate(api, model, on_progress=on_answer)
    console.print(evaluation_line(measured.evaluation), highlight=False)
    for concurrency in config.levels:
        level = run_level(api.address, model, concurrency, config.seed, folder.requests_path, console)
        measured.levels.append(level)
        if level.verdict == "PARTIAL":  # the load generator took the Ctrl-C and ended the level in order
            raise KeyboardInterrupt
        if level.failed and server.ended_within(_DEATH_S):
            raise MeltcoreError(f"the server ended at {load_of(level)}; its last lines:\n{server.last_lines()}")


def _print_checks(console: Console, checks: list[CheckResult]) -> None:
    passed = sum(check.status == "PASS" for check in checks)
    console.print(f"{passed} of {len(checks)} API checks passed", highlight=False)
    for check in checks:
        if check.status == "FAIL":
            print_check(console, check)


def _result(
    config: DemoConfig, measured: _Measured, ended_by: tuple[Verdict, str] | None, started: str, duration_s: float
) -> RunResult:
    if ended_by is not None:
        verdict, reasons = ended_by[0], [ended_by[1]]
    elif measured.evaluation is None:
        raise AssertionError("a run that was not cut short has asked the held-out problems")
    else:
        verdict, reasons = judge(measured.checks, measured.evaluation, measured.levels, config.levels)
    cores = measured.fingerprint.cores
    settings = {
        "model": config.model,
        **measured.facts,
        "levels": list(config.levels),
        "workloads": {f"{count:,}": workload_of(count) for count in config.levels},
        "sampling": "greedy, streamed",
    }
    return RunResult(
        command="demo",
        status="complete" if ended_by is None else "partial",
        started=started,
        duration_s=duration_s,
        fingerprint=measured.fingerprint,
        settings=settings,
        accuracy=measured.evaluation.share if measured.evaluation else None,
        evaluation=measured.evaluation,
        checks=measured.checks,
        levels=measured.levels,
        verdict=verdict,
        reasons=reasons,
        notes=model_notes(measured.facts) + _notes(config, cores),
    )


def _notes(config: DemoConfig, cores: int) -> list[str]:
    notes = [f"Server and load generator shared the {cores} cores of one machine, so each slowed the other."]
    if len({workload_of(count) for count in config.levels}) > 1:
        notes.append(
            f"Levels of {SHORT_FROM:,} and more ask short problems; those below ask mixed ones, pages of facts among "
            f"them, and so cost far more per request."
        )
    return notes
