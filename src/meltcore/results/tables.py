"""The console tables of results: one row a level."""

from collections.abc import Sequence

from rich.table import Table

from meltcore.results.schema import LevelResult
from meltcore.results.wording import number, percent, percentile

_LATENCIES = (("TTFT", "ttft_ms"), ("ITL", "itl_ms"))


def levels_table(levels: Sequence[LevelResult], title: str | None = None) -> Table:
    """What a measuring command prints last. Latencies in ms; "n too small" becomes "n<" to keep the columns narrow."""
    table = Table(title=title, title_justify="left", pad_edge=False)
    open_loop = any(level.load_kind == "open" for level in levels)
    for name in ("req/s" if open_loop else "at once", "requests", "failed", "peak", "right", "tok/s", "steady"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, _ in _LATENCIES:
        table.add_column(f"{name} p50", justify="right", no_wrap=True)
        table.add_column("p99 ms", justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for level in levels:
        table.add_row(*_row(level, open_loop))
    return table


def _row(level: LevelResult, open_loop: bool) -> list[str]:
    load = number(level.rate_per_s) if open_loop else f"{level.concurrency:,}"
    steady = number(level.steady.output_tokens_per_s) if level.steady else "none"
    failed = f"[red]{level.failed:,}[/]" if level.failed else "0"
    cells = [load, f"{level.requests:,}", failed, f"{level.peak_in_flight:,}", percent(level.accuracy)]
    cells += [number(level.output_tokens_per_s), steady]
    for _, field in _LATENCIES:
        found = getattr(level, field)
        cells += [_short(percentile(found, "p50")), _short(percentile(found, "p99"))]
    style = "green" if level.verdict == "OK" else "red"
    return [*cells, f"[{style}]{level.verdict}[/]"]


def _short(text: str) -> str:
    return "n<" if text.startswith("n ") else text
