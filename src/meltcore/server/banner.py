"""What a person sees when a server starts: where it listens, how loading goes, where the memory went."""

from __future__ import annotations

import io
import os
import sys
import time
from typing import TextIO

from rich.console import Console
from rich.table import Table

from meltcore.config import ServerConfig
from meltcore.server.model import Model

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def say(text: str, stream: TextIO, end: str = "\n") -> None:
    """Print at once. Where nobody can read it any more, the server goes on and what it says goes nowhere: a terminal
    may be gone, and a program may have read no more than our first line."""
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def print_listening(url: str) -> None:
    """The first line on standard output, for people and for programs that started us with --port 0."""
    say(f"meltcore: listening on {url}", sys.stdout)


class Progress:
    """Loading stages on standard error: one line that changes on a terminal, else one line a stage, with the seconds
    from the start of loading."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._started = time.monotonic()
        self._stage = ""

    def show(self, reason: str) -> None:
        stage = reason.split(" (")[0]
        if self._live:
            say(f"\r\033[Kmeltcore: {reason}", sys.stderr, end="")
        elif stage != self._stage:
            say(f"meltcore: {reason} after {time.monotonic() - self._started:.1f} s", sys.stderr)
        self._stage = stage

    def clear(self) -> None:
        if self._live and self._stage:
            say("\r\033[K", sys.stderr, end="")


def print_ready(config: ServerConfig, model: Model, fronts: int) -> None:
    """What is served, its limits, and the memory table."""
    # Rich would end the process where the reader of standard output is gone.
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=sys.stdout.isatty(), highlight=False, soft_wrap=True)
    _show_ready(console, config, model, fronts)
    say(shown.getvalue(), sys.stdout, end="")


def _show_ready(console: Console, config: ServerConfig, model: Model, fronts: int) -> None:
    engine = model.engine
    replicas = f"{config.dp} replicas, each with " if config.dp > 1 else ""
    marks = [f"{engine.weights} weights"] if engine.weights == "dummy" else []
    marks += ["synthetic tokenizer"] if model.text.tokenizer.synthetic else []
    marks += [f"debug {switch}" for switch in config.engine.debug]
    note = f" [{', '.join(marks)}]" if marks else ""
    console.print(f"meltcore: ready: {', '.join(model.names)} on {engine.device} in {engine.dtype}{note}", markup=False)
    console.print(
        f"  {replicas}context {engine.max_model_len} tokens, {engine.max_num_seqs} sequences a step, "
        f"{engine.pages_total} KV pages of {engine.page_size} tokens, loaded in {engine.load_s:.1f} s, "
        f"{fronts} front process{'es' if fronts > 1 else ''}",
        markup=False,
    )
    table = Table(
        title="memory of each replica" if config.dp > 1 else "memory",
        title_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    table.add_column("part")
    table.add_column("size", justify="right")
    table.add_column("note")
    for row in engine.memory:
        table.add_row(row.name, size_text(row.size_bytes), row.note)
    console.print(table)


def size_text(size_bytes: int) -> str:
    """1536 as "1.50 KiB"."""
    for unit, name in _UNITS:
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f} {name}"
    return f"{size_bytes} B"
