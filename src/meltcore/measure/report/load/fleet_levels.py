"""The levels of a load on a fleet, mixed or each model alone, as charts and tables of a page."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.schema import Distribution, FleetLevel, Part, StreamLoad
from meltcore.measure.documents.values.formatting import NOT_MEASURED, format_number
from meltcore.measure.documents.values.throughput import rate_of, throughput
from meltcore.measure.load.tasks.task import first_latency, task_of
from meltcore.measure.report.load.fleet_load_charts import fleet_charts
from meltcore.measure.report.page.page import (
    Block,
    Cell,
    Column,
    Figures,
    Row,
    Section,
    Table,
    Text,
    percentile_cell,
    verdict_cell,
)

_PART_TITLES: dict[Part, str] = {"mixed": "All models, mixed", "per-model": "Each model alone"}
LOSS_TEXT = (
    "Lost: requests without a whole answer. Refused at first: a 429 or 503 whose Retry-After was obeyed, and the "
    "request sent again; its latency counts from the first try."
)
_GPU_METRICS = (
    ("sm_active_percent", "SM active, %", 1.0),
    ("dram_bandwidth_percent", "DRAM, %", 1.0),
    ("power_w", "power, W", 1.0),
    ("memory_used_bytes", "memory, GiB", 2.0**30),
)


def mixed_tables(levels: Sequence[FleetLevel]) -> list[Table]:
    """Return a table per mixed level, with its label."""
    return [_level_table([level], level.part, f"{level.label}. {_gpu_text(level)}".rstrip()) for level in levels]


def part_section(levels: Sequence[FleetLevel], part: Part) -> Section:
    """Return the charts and tables of the levels that belong to a part."""
    levels = [level for level in levels if level.part == part]
    if not levels:
        return Section()
    tables: list[Block] = []
    groups: dict[str, list[FleetLevel]] = {}
    for level in levels:  # a table per mixed level, and per model alone
        groups.setdefault(level.label if part == "mixed" else level.streams[0].name, []).append(level)
    for title, group in groups.items():
        note = "; ".join(filter(None, (_gpu_text(level) for level in group))) if part == "mixed" else ""
        tables += [Text(title), _level_table(group, part, note)]
    figures = fleet_charts(levels, part)
    return Section(_PART_TITLES[part], [*([Figures(figures)] if figures else []), *tables])


def _level_table(levels: Sequence[FleetLevel], part: Part, note: str) -> Table:
    is_mixed = part == "mixed"
    columns = [
        Column("Model" if is_mixed else "Connections", align="text", console="model" if is_mixed else "conn."),
        *([Column("connections", console="conn.")] if is_mixed else []),
        Column("sent", "Requests"),
        Column("lost", "Requests"),
        Column("refused", "Requests", console="ref."),
        Column("whole", "Throughput", console="through-\nput"),
        Column("steady", "Throughput", console=None),
        *_latency_columns("First token or audio, ms", "first"),
        *_latency_columns("End to end, ms", "end"),
        *([] if is_mixed else [Column("GPU", align="text", console=None)]),
        Column("Verdict", console=" "),
    ]
    rows = [_load_row(level, load, is_mixed=is_mixed) for level in levels for load in level.streams]
    return Table(columns, rows, note=note, is_compact=True)


def _latency_columns(group: str, word: str) -> list[Column]:
    shown = {"p50": f"{word}\np50", "p95": "ms\np95", "p99": None}
    return [Column(name, group, console=console) for name, console in shown.items()]


def _load_row(level: FleetLevel, load: StreamLoad, *, is_mixed: bool) -> Row:
    result, unit = load.level, task_of(load.level).unit.short_unit
    steady = Cell("none", "faint") if result.steady is None else format_number(rate_of(result.steady))
    cells: list[str | Cell] = [
        Cell(load.name) if is_mixed else Cell(f"{result.concurrency:,}"),
        *([f"{result.concurrency:,}"] if is_mixed else []),
        f"{result.requests:,}",
        Cell(f"{load.lost:,}", "warning" if load.lost else ""),
        f"{load.refused:,}",
        f"{format_number(throughput(result))} {unit}",
        steady,
        *latency_cells(first_latency(result)),
        *latency_cells(result.e2e_ms),
        *([] if is_mixed else [_gpu_text(level) or NOT_MEASURED]),
        verdict_cell(result.verdict),
    ]
    return Row(cells)


def latency_cells(distribution: Distribution | None) -> list[str | Cell]:
    """Return p50, p95 and p99 of a latency."""
    if distribution is None or not distribution.n:
        return [Cell(NOT_MEASURED, "faint")] * 3
    return [percentile_cell(distribution, name) for name in ("p50", "p95", "p99")]


def _gpu_text(level: FleetLevel) -> str:
    """Return the means of each GPU over the level, or "" without a measurement."""
    texts = []
    for gpu in level.gpus:
        found = [f"{title.replace(',', ' ' + format_number(gpu.means[key] / unit))}"
                 for key, title, unit in _GPU_METRICS if key in gpu.means]  # fmt: skip
        texts.append(f"{gpu.gpu}: {', '.join(found)}" if found else "")
    return "; ".join(filter(None, texts))
