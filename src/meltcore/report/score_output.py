"""A GPU score on the console: a line a level while it runs, tables and the number at the end."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from meltcore.report.score_page import meanwhile
from meltcore.results.percentiles import TOO_SMALL
from meltcore.results.schema import Distribution
from meltcore.results.score import GpuScore, ScoredRun, ScoreLevel
from meltcore.results.wording import number, percentile

_HEADS = ("at\nonce", "output\ntok/s", "total\ntok/s", "req/s", "TTFT\np50 ms", "\np99 ms", "ITL\np50 ms", "\np99 ms",
          "W", "tok/J")  # fmt: skip
_TOO_FEW = "n<"


def level_line(label: str, level: ScoreLevel, sustained: bool) -> str:
    """What is said as soon as a level is over."""
    kind = "sustained" if sustained else "at once"
    parts = [
        f"{label:<7} {level.concurrency:>7,} {kind:<10}",
        f"{number(level.output_tokens_per_s):>8} tok/s",
        f"ITL {_milliseconds(level.itl_ms, 5)}",
        f"TTFT {_milliseconds(level.ttft_ms, 6)}",
    ]
    return "  ".join(parts).rstrip()


def print_score(result: ScoredRun, console: Console) -> None:
    """A table a device, what to know about it, and the one number last."""
    score = result.score
    for device in score.devices:
        console.print(_table(device))
        _print_health(device, console)
    if any(_TOO_FEW in cell for device in score.devices for level in _all_levels(device) for cell in _cells(level)):
        console.print(f"{_TOO_FEW}  too few requests for this percentile; a longer --duration has more", style="dim")
    for reason in result.reasons:
        console.print(reason, style="red", markup=False)
    for note in result.notes:
        console.print(note, style="yellow", markup=False)
    for reason in score.not_comparable:
        console.print(f"[bold red]NOT COMPARABLE[/]: {reason}")
    value = "no score" if score.output_tokens_per_s is None else f"{number(score.output_tokens_per_s)} output tokens/s"
    what = f"{score.workload}, {score.model}, {score.dtype}, {score.weights} weights, engine {score.engine}"
    console.print(f"[bold]{value}[/]  ({what})", soft_wrap=True)


def _all_levels(device: GpuScore) -> list[ScoreLevel]:
    return [*device.levels, *([] if device.sustained is None else [device.sustained])]


def _table(device: GpuScore) -> Table:
    title = f"{device.label}: {device.name}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, show_edge=False)
    for head in _HEADS:
        table.add_column(head, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("", no_wrap=True)
    for level in device.levels:
        table.add_row(*_cells(level), "ramp cut" if level.ramp_cut else "")
    if device.sustained is not None:
        table.add_section()
        table.add_row(*_cells(device.sustained), "sustained", style="bold")
    return table


def _cells(level: ScoreLevel) -> list[str]:
    rates = (level.output_tokens_per_s, level.total_tokens_per_s, level.requests_per_s)
    latencies = ((level.ttft_ms, "p50"), (level.ttft_ms, "p99"), (level.itl_ms, "p50"), (level.itl_ms, "p99"))
    return [
        f"{level.concurrency:,}",
        *map(number, rates),
        *(_short(percentile(found, name)) for found, name in latencies),
        number(level.power_w),
        number(level.tokens_per_joule),
    ]


def _milliseconds(found: Distribution, width: int) -> str:
    """The median with its unit; a sample too small for it has none."""
    text = _short(percentile(found, "p50"))
    return f"{text:>{width}}" + (" ms" if found.p50 is not None else "   ")


def _short(text: str) -> str:
    return _TOO_FEW if text == TOO_SMALL else text


def _print_health(device: GpuScore, console: Console) -> None:
    if device.spread is not None:
        change = "" if device.spread.change is None else f", last third {100 * device.spread.change:+.1f} %"
        console.print(f"  over time: varies by {100 * device.spread.variation:.1f} %{change}", markup=False)
    said = meanwhile(device)
    if said:
        console.print(f"  {said}", style="dim", markup=False)
    if device.health is not None:
        style = {"HEALTHY": "green", "DEGRADED": "bold red", "UNKNOWN": "yellow"}[device.health.verdict]
        console.print(f"  [{style}]{device.health.verdict}[/]")
        for reason in device.health.reasons:
            console.print(f"    {reason}", markup=False)
