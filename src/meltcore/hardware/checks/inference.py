"""A minute of inference: does the engine, on each GPU, still give the right answers? Run last, beside a sound machine.

Each GPU serves the bundled model alone, and all do so at once. A failure here after a pass of all above points at the
software; so it has a code of its own.
"""

import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from meltcore.errors import ConfigError
from meltcore.hardware import faults
from meltcore.hardware.checks.base import Check
from meltcore.hardware.conditions import Watch
from meltcore.hardware.judge import Judged, findings_of, throttle
from meltcore.hardware.node import Ran
from meltcore.hardware.site import Site
from meltcore.results.certificate import CheckReport, Row, worst
from meltcore.results.runfolder import read_result
from meltcore.results.schema import RunResult

_ENGINE = ("torch", "tokenizers", "starlette", "zmq")
_LEVELS = {"standard": "10,100"}
_LEVELS_OF_MORE = "10,100,400"
_LIMIT_S = 300.0
_RIGHT_FLOOR = 0.95  # of meltcore demo's gate
_PASSED, _FAILED = 0, 1  # exit codes of meltcore demo


class Inference(Check):
    name = "inference"
    title = "A minute of inference"

    def not_applicable(self, site: Site) -> str:
        missing = [package for package in _ENGINE if find_spec(package) is None]
        return f"the engine is not installed ({', '.join(missing)} missing)" if missing else ""

    def run(self, site: Site) -> CheckReport:
        why = self.not_applicable(site)
        if why:
            return self.neutral(why)
        began_s = site.node.now_s()
        busy = site.busy()
        watch = Watch(site, self.name)
        with ThreadPoolExecutor(max_workers=len(site.gpus)) as pool:
            try:
                ran = list(pool.map(lambda position: _demo(site, position), site.positions))
            except BaseException:  # Ctrl-C: the pool waits for its threads, and these for their programs
                site.node.end_programs()
                raise
        conditions, seen, slowed = watch.close()
        judged = [_judged(site, position, ran[position], position in busy) for position in site.positions]
        throttle(judged, slowed)
        rows = [one.row for one in judged] + [row for position in site.positions for row in _speeds(site, position)]
        findings = [*findings_of(self.name, judged), *seen]
        return CheckReport(
            name=self.name,
            title=self.title,
            verdict=worst([*(row.verdict for row in rows), *(finding.verdict for finding in findings)]),
            rows=rows,
            findings=findings,
            conditions=conditions,
            duration_s=site.node.now_s() - began_s,
        )


def _folder(site: Site, position: int) -> Path:
    return site.folder / f"inference-{position}"


def _demo(site: Site, position: int) -> Ran:
    levels = _LEVELS.get(site.tier, _LEVELS_OF_MORE)
    command = [sys.executable, "-m", "meltcore.cli.main", "demo", "--levels", levels]
    environment = {**site.environment(), "CUDA_VISIBLE_DEVICES": site.gpus[position].info.uuid}
    return site.node.run([*command, "--out", str(_folder(site, position))], b"", environment, _LIMIT_S)


def _judged(site: Site, position: int, ran: Ran, busy: bool) -> Judged:
    row = Row(
        key="inference/right", subject=site.label((position,)), gpus=[position], unit="% right", verdict="UNKNOWN"
    )
    judged = Judged(row)
    result = _result(site, position)
    if result is not None and result.evaluation is not None:
        row.measured = 100 * result.evaluation.share
        row.floor = 100 * _RIGHT_FLOOR
    if ran.code is None:
        judged.lower("UNKNOWN", faults.TIMED_OUT, f"the run took more than {_LIMIT_S:.0f} s and was killed")
    elif ran.code == _FAILED and result is not None:
        judged.lower("FAIL", faults.WRONG_ANSWERS, "; ".join(result.reasons[:3]) or "the run did not pass")
    elif ran.code != _PASSED or row.measured is None:
        judged.lower("UNKNOWN", faults.PROBE_FAILED, f"the run ended with status {ran.code}: {ran.last_words}")
    else:
        row.verdict = "PASS"
    if busy and row.verdict == "PASS":
        judged.lower("INVALID", faults.BUSY, "another program was computing on it")
    return judged


def _result(site: Site, position: int) -> RunResult | None:
    """Of the one run in the folder; None where it wrote none."""
    folders = sorted(_folder(site, position).glob("*-demo")) if _folder(site, position).is_dir() else []
    try:
        return read_result(folders[-1]) if folders else None
    except ConfigError:
        return None  # a run that was cut off has no result, which its verdict says


def _speeds(site: Site, position: int) -> Sequence[Row]:
    """Recorded, not judged: all GPUs share the host's cores here."""
    result = _result(site, position)
    return [
        Row(
            key=f"inference/{level.concurrency}-at-once",
            subject=site.label((position,)),
            gpus=[position],
            unit="tok/s",
            verdict="RECORDED",
            measured=level.output_tokens_per_s,
        )
        for level in (result.levels if result is not None else [])
    ]
