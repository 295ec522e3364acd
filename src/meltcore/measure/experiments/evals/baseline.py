"""Runs the full evaluation of another server (vLLM, SGLang ...), started by a command from another environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.fingerprint import clean_arguments
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.experiments.evals.config import EvaluationConfig
from meltcore.measure.experiments.evals.evaluation import run_evaluation
from meltcore.measure.experiments.servers.api import Api
from meltcore.measure.experiments.servers.process import START_LIMIT_S, ServerProcess, accepts_connections

SERVER_LOG = "server.log"
_SETTLE_S = 2.0  # a command that only starts its server in the background ends within this after that is ready
# They point at our packages, which another environment's Python must not find.
_PYTHON_VARIABLES = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def run_baseline(
    config: EvaluationConfig,
    command: str,
    folder: Path,
    console: Console,
    arguments: Sequence[str] = (),
    start_timeout_s: float = START_LIMIT_S,
) -> RunResult:
    """Start `command`, wait until the server of `config` is ready, evaluate it, and end its process group.

    The result is written into `folder` before the server is ended, which takes a while, and is returned.

    Raises ConfigError if a server already answers at the address, or if `command` leaves its server in the background.
    Raises ProcessError if the server does not become ready in time.
    """
    argv = _split_command(command)
    url, api_key = config.throughput.url, config.throughput.api_key
    Api(url, api_key=api_key)  # raises now for a malformed address or key
    if accepts_connections(url):
        raise ConfigError(f"a server answers at {url} already: it would be measured instead of the baseline's")

    def report(text: str) -> None:
        console.print(text, style="yellow", highlight=False, markup=False)

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
