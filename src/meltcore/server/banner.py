"""What a person sees when a server starts: where it listens, how loading goes, where the memory went."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.table import Table

from meltcore.config import ServerConfig
from meltcore.server.model import Model

_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def print_listening(url: str) -> None:
    """The first line on standard output, for people and for programs that started us with --port 0."""
    print(f"meltcore: listening on {url}", flush=True)


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
            print(f"\r\033[Kmeltcore: {reason}", end="", file=sys.stderr, flush=True)
        elif stage != self._stage:
            print(f"meltcore: {reason} after {time.monotonic() - self._started:.1f} s", file=sys.stderr, flush=True)
        self._stage = stage

    def clear(self) -> None:
        if self._live and self._stage:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def print_ready(config: ServerConfig, model: Model, fronts: int) -> None:
    """What is served, its limits, and the memory table."""
    engine = model.engine
    console = Console(highlight=False, soft_wrap=True)
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
