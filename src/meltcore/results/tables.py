"""The console tables of results: one row a level."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meltcore.results.schema import LevelResult
from meltcore.results.wording import number, percent, percentile

_LATENCIES = ("ttft_ms", "itl_ms")
_HEADS = ("sent", "failed", "peak", "right", "tok/s", "TTFT\np50 ms", "\np99 ms", "ITL\np50 ms", "\np99 ms")


def levels_table(levels: Sequence[LevelResult], title: str | None = None) -> Table:
    """What a measuring command prints last; fits 80 columns. "n<": the sample is too small for that percentile."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    open_loop = any(level.load_kind == "open" for level in levels)
    for head in ("req/s" if open_loop else "at\nonce", *_HEADS):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("", overflow="fold")
    for level in levels:
        table.add_row(*_row(level, open_loop))
    return table


def _row(level: LevelResult, open_loop: bool) -> list[str]:
    load = number(level.rate_per_s) if open_loop else f"{level.concurrency:,}"
    failed = f"[red]{level.failed:,}[/]" if level.failed else "0"
    cells = [load, f"{level.requests:,}", failed, f"{level.peak_in_flight:,}", percent(level.accuracy)]
    cells.append(number(level.output_tokens_per_s))
    for field in _LATENCIES:
        found = getattr(level, field)
        cells += [_short(percentile(found, "p50")), _short(percentile(found, "p99"))]
    style = "green" if level.verdict == "OK" else "red"
    return [*cells, f"[{style}]{level.verdict}[/]"]


def _short(text: str) -> str:
    return "n<" if text.startswith("n ") else text
