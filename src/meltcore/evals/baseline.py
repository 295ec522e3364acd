"""The same evaluation of another server (vLLM, SGLang ...), which a command starts from an environment of its own."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console

from meltcore.errors import ConfigError
from meltcore.evals.api import Api
from meltcore.evals.server_process import ServerProcess, accepts
from meltcore.evals.whole import WholeConfig, run_whole
from meltcore.results.fingerprint import clean_arguments
from meltcore.results.runfolder import RunFolder
from meltcore.results.schema import RunResult

SERVER_LOG = "server.log"
START_LIMIT_S = 900.0  # vLLM took 217 s for Qwen3.5-35B-A3B on eight H200s (2026-11-20), more where it must compile
_SETTLE_S = 2.0  # within which a command that only starts its server in the background ends, once that is ready
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

    The result is written into `folder` before the server is ended, which takes a while, and is returned.

    Raises ConfigError where something is at the address already or `command` leaves its server in the background,
    ServerError where ours does not come up in time.
    """
    words = _split(command)
    url, api_key = config.throughput.url, config.throughput.api_key
    Api(url, api_key=api_key)  # refuses now what cannot be an address or a key
    if accepts(url):
        raise ConfigError(f"a server answers at {url} already: it would be measured instead of the baseline's")

    def say(text: str) -> None:
        console.print(text, style="yellow", highlight=False, markup=False)

    environment = {name: value for name, value in os.environ.items() if name not in _OURS}
    shown = shlex.join(clean_arguments(words))
    result: RunResult | None = None
    try:
        with ServerProcess(words, folder / SERVER_LOG, say=say, environment=environment) as server:
            with console.status(f"waiting for {words[0]} to be ready at {url}"):
                server.wait_healthy(url, start_limit_s, api_key=api_key, settle_s=_SETTLE_S)
            result = run_whole(config, folder, console, arguments, "baseline")
            result.settings["server_command"] = shown
            RunFolder(folder).write_result(result)
            # A further Ctrl-C takes effect when the server is gone, and then there is nothing left to interrupt.
            with console.status("ending the server"), suppress(KeyboardInterrupt):
                server.stop()
    finally:
        if accepts(url):
            left = f"A server still answers at {url} after {shown} was ended: end it yourself."
            if result is None:
                say(left)
            else:
                result.notes.append(left)
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
