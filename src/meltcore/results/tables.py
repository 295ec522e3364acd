"""The console tables of results: one row a level."""

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table

from meltcore.results.schema import LevelResult
from meltcore.results.wording import number, percent, percentile

_TOO_FEW = "n<"
_LATENCIES = ("ttft_ms", "itl_ms")
_HEADS = ("sent", "failed", "peak", "right", "tok/s", "TTFT\np50 ms", "\np99 ms", "ITL\np50 ms", "\np99 ms")


def levels_table(levels: Sequence[LevelResult], title: str | None = None) -> Table:
    """What a measuring command prints last; fits 80 columns."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    open_loop = any(level.load_kind == "open" for level in levels)
    for head in ("req/s" if open_loop else "at\nonce", *_HEADS):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("", overflow="fold")
    for level in levels:
        table.add_row(*_row(level, open_loop))
    return _explained(table, levels)


def throughput_table(levels: Sequence[LevelResult]) -> Table:
    """What `eval throughput` prints: both ways to count tokens, latencies, and the spot checks; fits 80 columns."""
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    heads = ("at\nonce", "sent", "failed", "total\ntok/s", "output\ntok/s")
    for head in (*heads, "TTFT\np50 ms", "\np99 ms", "ITL\np50 ms", "\np99 ms", "spot\nchecks"):
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("", overflow="fold")
    for level in levels:
        checks = level.checks
        spots = "NOT RUN" if checks is None else f"{checks.spot_checks_right} of {checks.spot_checks}"
        table.add_row(
            f"{level.concurrency:,}",
            f"{level.requests:,}",
            _failed(level),
            number(level.total_tokens_per_s),
            number(level.output_tokens_per_s),
            *_latencies(level),
            spots,
            _verdict(level),
        )
    return _explained(table, levels)


def _row(level: LevelResult, open_loop: bool) -> list[str]:
    load = number(level.rate_per_s) if open_loop else f"{level.concurrency:,}"
    cells = [load, f"{level.requests:,}", _failed(level), f"{level.peak_in_flight:,}", percent(level.accuracy)]
    return [*cells, number(level.output_tokens_per_s), *_latencies(level), _verdict(level)]


def _failed(level: LevelResult) -> str:
    return f"[red]{level.failed:,}[/]" if level.failed else "0"


def _latencies(level: LevelResult) -> list[str]:
    found = [getattr(level, field) for field in _LATENCIES]
    return [_short(percentile(each, name)) for each in found for name in ("p50", "p99")]


def _verdict(level: LevelResult) -> str:
    style = "green" if level.verdict == "OK" else "red"
    return f"[{style}]{level.verdict}[/]"


def _explained(table: Table, levels: Sequence[LevelResult]) -> Table:
    """With a line below it that says what a cell without a number means, where there is one."""
    if any(_TOO_FEW in _latencies(level) for level in levels):
        table.caption, table.caption_justify = f"{_TOO_FEW}: too few requests for that percentile", "left"
    return table


def _short(text: str) -> str:
    return _TOO_FEW if text.startswith("n ") else text
