"""Prints the lines of a server's start: address, progress of loading, limits, memory, and a request to try."""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.table import Table

from meltcore.common.sizes import size_text
from meltcore.protocol.shell import EngineReady

if TYPE_CHECKING:
    from meltcore.fleet.run.served_model import ServedModel
    from meltcore.settings.fleet_spec import FleetSpec

PROGRESS_S = 10.0  # between two lines where standard error is not a terminal


def print_line(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print and flush a line.

    If the reader of standard output has ended, the server continues, and its output is dropped.
    """
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError:
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


def print_listening(url: str) -> None:
    """Print the first line on standard output. Programs that let --port 0 choose the port read it, too."""
    print_line(f"meltcore: listening on {url}", sys.stdout)


def print_substitutes(substitute: Mapping[str, Sequence[str]]) -> None:
    """Print one line for each language that the file replaces by others, because users may not expect it."""
    for language, others in substitute.items():
        print_line(f"meltcore: a model that does not know {language} gets it as {' or '.join(others)}", sys.stdout)


class LoadingProgress:
    """Shows loading stages on standard error.

    On a terminal this is one line that changes. Elsewhere it is one line per PROGRESS_S.
    """

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._shown_s: float | None = None

    def show(self, reason: str) -> None:
        """Show the current stage. Outside a terminal, the line has the seconds since the start of loading."""
        now_s = time.monotonic()
        if self._live:
            print_line(f"\r\033[Kmeltcore: {reason}", sys.stderr, end="")
        elif self._shown_s is None or now_s - self._shown_s >= PROGRESS_S:
            print_line(f"meltcore: {reason} after {now_s - self._started_s:.1f} s", sys.stderr)
        else:
            return
        self._shown_s = now_s

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._live and self._shown_s is not None:
            print_line("\r\033[K", sys.stderr, end="")


def print_ready(models: Sequence[ServedModel], api_servers: int) -> None:
    """Print the loaded models, their limits, and their memory tables."""
    # Rich would end the process when the reader of standard output is gone.
    output = io.StringIO()
    console = Console(file=output, force_terminal=sys.stdout.isatty(), highlight=False, soft_wrap=True)
    for model in models:
        if model.limits is not None:
            _show_model(console, model, model.limits, api_servers)
    print_line(output.getvalue(), sys.stdout, end="")


def print_examples(spec: FleetSpec, port: int, models: Sequence[ServedModel]) -> None:
    """Print the address of the page, and for each model a curl command that sends it a small request."""
    url = spec.server.url(port)
    key = ("-H", "authorization: Bearer KEY") if spec.keys or spec.server.api_key_file else ()
    print_line(f"meltcore: {url}/ is a page to try it", sys.stdout)
    for model in models:
        if model.task is not None and model.task.example:
            name = json.dumps(model.names[0])[1:-1]
            words = (part.replace("MODEL", name) for part in model.task.example)
            print_line(shlex.join(["curl", url + next(iter(model.task.paths)), *key, *words]), sys.stdout)


def _show_model(console: Console, model: ServedModel, engine: EngineReady, api_servers: int) -> None:
    several = len(model.replicas) > 1
    replicas = f"{len(model.replicas)} replicas, each with " if several else ""
    notes = [f"{engine.weights} weights"] if engine.weights == "dummy" else []
    notes += ["synthetic tokenizer"] if model.synthetic_tokenizer else []
    notes += ["synthetic output lengths"] if engine.has_synthetic_lengths else []
    notes += [f"debug {option}" for option in model.config.debug_options]
    notes += [f"overrides {json.dumps(model.config.hf_overrides)}"] if model.config.hf_overrides else []
    note = f" [{', '.join(notes)}]" if notes else ""
    console.print(f"meltcore: ready: {', '.join(model.names)} on {engine.device} in {engine.dtype}{note}", markup=False)
    console.print(
        f"  {replicas}{engine.describe_limits()}, loaded in {engine.load_s:.1f} s, "
        f"{api_servers} API server process{'es' if api_servers > 1 else ''}",
        markup=False,
    )
    table = Table(
        title="memory of each replica" if several else "memory", title_justify="left", show_edge=False, pad_edge=False
    )
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("note")
    for row in engine.memory:
        table.add_row(row.name, size_text(row.size_bytes), row.note)
    console.print(table)
