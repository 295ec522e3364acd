"""Rank processes of an all-reduce, forked from one process that has imported torch and the interpreter for all.

`python rank_processes.py MODULE FOLDER RANKS NUMBER...` runs `MODULE.main(FOLDER, RANK, RANKS, NUMBER...)` in each.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import pytest
from interpreter_tools import fix_interpreter
from waiting import WAIT_S


def run_ranks(module: str, folder: Path, ranks: int, *numbers: int) -> tuple[str, str]:
    """Standard output and standard error of all ranks, once they have ended or the first one has failed."""
    command = [sys.executable, __file__, module, str(folder), str(ranks), *map(str, numbers)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, text=True, env=environment, start_new_session=True, **pipes) as process:
        try:
            return process.communicate(timeout=WAIT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def main(module: str, folder: str, *numbers: str) -> None:
    fix_interpreter(pytest.MonkeyPatch())
    run = import_module(module).main
    ranks, *rest = map(int, numbers)
    children = []
    for rank in range(ranks):
        if not (child := os.fork()):
            run(Path(folder), rank, ranks, *rest)
            return
        children.append(child)
    while children:
        ended, status = os.wait()
        children.remove(ended)
        if status:
            for child in children:
                os.kill(child, signal.SIGKILL)
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
