"""Runs a comparison of backends: starts, loads, measures and ends each backend, then names the best."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from rich.console import Console

from meltcore import __version__
from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.files import write_document
from meltcore.common.gpus.driver import NoDriverError
from meltcore.common.process import ProcessError, free_port, stat_fields
from meltcore.common.process_output import last_error
from meltcore.measure.documents.backends import BackendComparison, BackendRun
from meltcore.measure.documents.fingerprint import clean_arguments, take_fingerprint
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.served_model import public_name
from meltcore.measure.documents.values.progress import warning_printer
from meltcore.measure.documents.verdicts import CUT_SHORT
from meltcore.measure.experiments.compare.backend_plan import OURS, BackendsPlan, PlannedRun
from meltcore.measure.experiments.compare.backend_verdicts import best_backends, find_aspects
from meltcore.measure.experiments.compare.starts import StartOptions
from meltcore.measure.experiments.servers import (
    Api,
    ApiError,
    ServerCommand,
    ServerProcess,
    run_server,
    server_version,
)
from meltcore.measure.load.run.runner import measure
from meltcore.measure.load.tasks.task import throughput_text
from meltcore.measure.node.monitor.recording import attach_gpu_timelines, read_recording
from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings
from meltcore.measure.report.comparisons.backends import backends_page
from meltcore.measure.report.page.html import write_page

_VERSION_ROUTES = {"/version": "version", "/get_server_info": "version", "/props": "build_info"}


def run_backends(
    plan: BackendsPlan,
    options: StartOptions,
    folder: RunFolder,
    console: Console,
) -> BackendComparison:
    """Run the plan, and return the result. Result and page are written after each run.

    Failed runs are in the result with their reasons. `console` shows a line per run. After Ctrl-C the finished runs are
    written, and KeyboardInterrupt is raised again.
    """
    start_s = time.monotonic()
    comparison = BackendComparison(
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        duration_s=0.0,
        fingerprint=take_fingerprint(options.arguments, options.load.seed),
        model=public_name(plan.model),
        backends=[*plan.backends, *plan.running],
        set_ups=list(plan.set_ups),
        most_sessions=plan.max_session_concurrency,
        settings=plan.settings.template_values | {"gpus": len(plan.gpus)},
        load=options.load.settings,
    )
    for planned in plan.runs():
        try:
            single_run = comparison.run(planned.backend, "single")
            if (
                planned.start == "load-balanced"
                and single_run is not None
                and single_run.command
                and single_run.ready_s is None
            ):
                planned = replace(planned, reason="it did not start alone")
            run = _run(planned, plan, options, folder.path, report=warning_printer(console))
        except KeyboardInterrupt:
            comparison.notes.append("It was interrupted: later runs were not made.")
            raise
        else:
            comparison.runs.append(run)
            console.print(_run_line(run), markup=False, highlight=False, soft_wrap=True)
        finally:
            comparison.duration_s = time.monotonic() - start_s
            comparison.best, comparison.aspects = best_backends(comparison), find_aspects(comparison)
            write_document(folder.result_path, comparison)
            write_page(folder.report_path, backends_page(comparison))
    return comparison


def _run_line(run: BackendRun) -> str:
    rates = "; ".join(
        f"{level.concurrency} concurrent {failure}"
        if (failure := run.failure(level.concurrency))
        else throughput_text(level)
        for level in run.levels
    )
    ready_note = "" if run.ready_s is None else f"ready after {run.ready_s:.1f} s"
    reason = f"not measured: {run.reason}" if run.reason else ""
    return f"{run.backend}, {run.start}: {', '.join(part for part in (ready_note, rates, reason) if part)}"


def _run(
    planned: PlannedRun, plan: BackendsPlan, options: StartOptions, folder: Path, *, report: Callable[[str], None]
) -> BackendRun:
    """Start, load and end one backend. The `reason` of the returned run says what failed."""
    run = BackendRun(
        backend=planned.backend,
        start=planned.start,
        model=planned.model,
        reason=planned.reason,
        command=planned.command.redacted if planned.command else "",
        lacks=list(planned.lacks),
        replicas=planned.replicas,
    )
    if run.reason:
        return run
    label = f"{planned.backend}-{planned.start}"
    log_path = folder / f"server-{label}.log"
    try:
        with _monitor(folder / f"gpus-{label}.jsonl", run) as recording:
            with _server(planned, plan, options, folder, log_path, report=report) as (url, server):
                run.ready_s = round(server.ready_s, 3) if server else None
                run.version = __version__ if planned.backend == OURS else backend_version(url)
                result = measure(replace(options.load, url=url), options.arguments)
                run.levels = [level for level in result.levels if level.verdict not in CUT_SHORT]
                run.reason = _failure(result)
                if server is not None:
                    run.host_memory_bytes = _host_memory_bytes(server.pid)
            if recording is not None:
                recording.stop()
        _add_gpus(run, folder / f"gpus-{label}.jsonl")
    except MeltcoreError as error:
        run.reason = published_reason(str(error))
        return run
    if result.verdict == "PARTIAL":
        raise KeyboardInterrupt  # the load generator handled the Ctrl-C to end its level in order
    return run


@contextmanager
def _server(
    planned: PlannedRun,
    plan: BackendsPlan,
    options: StartOptions,
    folder: Path,
    log_path: Path,
    *,
    report: Callable[[str], None],
) -> Iterator[tuple[str, ServerProcess | None]]:
    """Yield the address of a server that has answered a request, and the server itself if it was started here."""
    if planned.url:
        if not Api(planned.url).is_reachable():
            raise ProcessError("nothing answers a request for its models at its address")
        yield planned.url, None
        return
    assert planned.command is not None
    command, port = planned.command, free_port()
    if planned.start == "load-balanced":
        fleet = folder / f"fleet-{planned.backend}.yaml"  # JSON is YAML
        fleet.write_text(json.dumps(planned.fleet(port, options.start_limit_s, plan.settings.api_server_count)))
        command = ServerCommand((sys.executable, "-m", "meltcore.cli.main", "up", str(fleet)))
    limit_s = options.start_limit_s
    answers = partial(_answers, deadline_s=time.monotonic() + limit_s)
    with run_server(command, log_path, report=report, limit_s=limit_s, port=port, is_ready=answers) as server:
        yield server.url, server


def _answers(url: str, deadline_s: float) -> bool:
    """Return whether the server answers a request for one token before `deadline_s` (time.monotonic)."""
    api = Api(url, timeout_s=max(1.0, deadline_s - time.monotonic()))
    try:
        name, _ = api.resolve_model()
        return api.post("/v1/completions", {"model": name, "prompt": "1", "max_tokens": 1}).status == 200
    except (ApiError, ConfigError):
        return False


def backend_version(url: str) -> str | None:
    """Return the version that vLLM, SGLang or llama.cpp reports over HTTP. Returns None if the server reports none."""
    versions = (server_version(url, path, key) for path, key in _VERSION_ROUTES.items())
    return next(filter(None, versions), None)


def published_reason(text: str) -> str:
    """Return the text of an error for results: its first line and the last exception of its output, without folders."""
    first_line, _, output = text.strip().partition("\n")
    lines = dict.fromkeys(filter(None, [first_line.strip(), last_error(output)]))
    return " ".join(" ".join(clean_arguments(line.split())) for line in lines)[:400]


def _failure(result: RunResult) -> str:
    """Return why a load stopped early, or "" if it was measured to its end."""
    failed = [level for level in result.levels if level.verdict in CUT_SHORT]
    return f"at concurrency {failed[0].concurrency}: {'; '.join(failed[0].reasons)}" if failed else ""


@contextmanager
def _monitor(path: Path, run: BackendRun) -> Iterator[Monitor | None]:
    """Record the use of the GPUs during the block. Without an NVIDIA driver, yield None and add a note to `run`."""
    try:
        monitor = Monitor(SamplerSettings(path=str(path)))
    except NoDriverError as error:
        path.unlink(missing_ok=True)
        run.notes.append(f"GPU use: not measured ({published_reason(str(error))})")
        yield None
        return
    with monitor:
        yield monitor


def _add_gpus(run: BackendRun, path: Path) -> None:
    """Add the GPU use of each level, and the peak GPU memory under load, to `run`."""
    if not path.exists():
        return
    run.notes += attach_gpu_timelines(run.levels, read_recording(path))
    peaks = [
        sum(max((value for value in gpu.values["memory_used_bytes"] if value), default=0.0) for gpu in level.gpus)
        for level in run.levels
        if level.gpus and all("memory_used_bytes" in gpu.values for gpu in level.gpus)
    ]
    run.gpu_memory_bytes = int(max(peaks)) if peaks else None


def _host_memory_bytes(root: int) -> int | None:
    """Return the memory of a process and its descendants, in which shared pages count once.

    Returns None if the memory cannot be read.
    """
    stats_by_pid = {int(path.name): stat_fields(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    parents = {pid: int(fields[1]) for pid, fields in stats_by_pid.items() if fields is not None}
    process_ids = {root}
    while children := {pid for pid, parent in parents.items() if parent in process_ids} - process_ids:
        process_ids |= children
    total = 0
    for pid in process_ids:
        try:
            text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:  # it has just ended, or is another user's
            if pid == root:
                return None
            continue
        total += sum(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:"))
    return total
