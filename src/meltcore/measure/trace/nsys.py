"""Runs a command under Nsight Systems and exports the recorded report to SQLite.

Options and files: "CLI Command Switches" and "Importing QDSTRM files" of the user guide,
https://docs.nvidia.com/nsight-systems/UserGuide/index.html. nsys writes a .qdstrm while it records. Its importer, a
separate program, converts the .qdstrm to a .nsys-rep.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.process import LoggedProcess, describe_exit
from meltcore.measure.trace.read import export

LOG_FILE = "nsys.log"
_NAME = "trace"
_MISSING_ADVICE = (
    "nsys is not installed here (not on PATH): install NVIDIA Nsight Systems, or profile elsewhere and read its "
    "report with `meltcore profile FILE.nsys-rep` or its export with `meltcore profile FILE.sqlite`"
)


def find_nsys() -> str:
    """Return the path of nsys. Raises ConfigError if nsys is not installed."""
    nsys_path = shutil.which("nsys")
    if nsys_path is None:
        raise ConfigError(_MISSING_ADVICE)
    return nsys_path


def nsys_command(nsys: str, command: Sequence[str], folder: Path, *, has_range: bool) -> list[str]:
    """Return the command line that records `command`, with `folder`/trace as the report.

    With `has_range` it records only between cudaProfilerStart and cudaProfilerStop, and the command is then ended by
    SIGTERM.
    """
    options = [
        "--trace=cuda,nvtx,osrt",
        "--cuda-graph-trace=node",  # kernels of graphs, not each graph as a whole
        "--sample=none",
        "--force-overwrite=true",
        f"--output={folder / _NAME}",
    ]
    if has_range:
        options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop-shutdown", "--kill=sigterm"]
    return [nsys, "profile", *options, *command]


def record(
    command: Sequence[str],
    folder: Path,
    *,
    limit_s: float,
    report: Callable[[str], None],
    mark: Callable[[LoggedProcess], None] | None = None,
) -> Path:
    """Run `command` under nsys and return the path of the SQLite export of its report. The files are in `folder`.

    The command has `limit_s` from its start to the written report. `report` takes lines for the user. `mark` starts and
    stops the capture of a running command, such as a server. Without `mark` the whole command is recorded.

    Raises ConfigError if nsys is missing, exceeds the limit or leaves no report. nsys and the command are ended on
    every exception.
    """
    nsys = find_nsys()
    log = folder / LOG_FILE
    line = nsys_command(nsys, command, folder, has_range=mark is not None)
    with LoggedProcess(line, log, name="nsys", report=report) as running:
        if mark is not None:
            mark(running)
        has_ended = running.ended_within(limit_s)
        status = running.returncode
    nsys_path = folder / f"{_NAME}.nsys-rep"
    if not has_ended:
        raise ConfigError(
            f"nsys did not end within {limit_s:g} s and was ended; {_missing_report_reason(folder)}; {_output(log)}"
        )
    if not nsys_path.is_file():
        raise ConfigError(
            f"nsys ended with {describe_exit(status or 0)}; {_missing_report_reason(folder)}; {_output(log)}"
        )
    if status and mark is None:
        report(f"the command ended with {describe_exit(status)}; the report covers what it did until then")
    target = folder / f"{_NAME}.sqlite"
    export(nsys_path, target)
    return target


def _output(log: Path) -> str:
    """Return a text that says in which file the output of nsys and its command is, or that there is none."""
    return f"its output: {log}" if log.stat().st_size else f"it printed nothing ({log})"


def _missing_report_reason(folder: Path) -> str:
    """Return a text that names the files which nsys left instead of a report, and says how to convert them."""
    raw = folder / f"{_NAME}.qdstrm"
    if not raw.is_file():
        return "it left no report"
    return (
        f"it left {raw} without a report: run `QdstrmImporter --input-file {raw}` of Nsight Systems' host folder, "
        f"then `meltcore profile {raw.with_suffix('.nsys-rep')}`"
    )
