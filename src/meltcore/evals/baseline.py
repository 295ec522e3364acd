"""The same evaluation of another server (vLLM, SGLang ...), which a command starts from an environment of its own."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from meltcore.errors import ConfigError
from meltcore.evals.server_process import ServerProcess, healthy
from meltcore.evals.whole import WholeConfig, run_whole
from meltcore.results.fingerprint import clean_arguments
from meltcore.results.schema import RunResult

SERVER_LOG = "server.log"
START_LIMIT_S = 900.0  # vLLM took 217 s for Qwen3.5-35B-A3B on eight H200s (2026-11-20), more where it must compile
# They point at our packages, which another environment's Python must not find.
_OURS = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")


def run_baseline(
    config: WholeConfig,
    command: str,
    folder: Path,
    console: Console,
    arguments: Sequence[str] = (),
    start_limit_s: float = START_LIMIT_S,
) -> RunResult:
    """Start `command`, wait until the server of `config` is ready, evaluate it as `run_whole` does, end its group.

    Raises ConfigError where a server answers there already, ServerError where ours does not come up in time.
    """
    words = _split(command)
    url = config.throughput.url
    if healthy(url):
        raise ConfigError(f"a server answers at {url} already: it would be measured instead of the baseline's")

    def say(text: str) -> None:
        console.print(text, style="yellow", highlight=False)

    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    with ServerProcess(words, folder / SERVER_LOG, say=say, environment=environment) as server:
        with console.status(f"waiting for {words[0]} to be ready at {url}"):
            server.wait_healthy(url, start_limit_s)
        result = run_whole(config, folder, console, arguments, "baseline")
        with console.status("ending the server"):
            server.stop()
    result.settings["server_command"] = shlex.join(clean_arguments(words))
    return result


def _split(command: str) -> list[str]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"--command {command!r} cannot be read: {error}") from error
    if not words:
        raise ConfigError("--command is empty; give what starts the server")
    if "=" in words[0]:
        raise ConfigError(f"--command is run without a shell, which would set {words[0]}; write env {words[0]} ...")
    return words
