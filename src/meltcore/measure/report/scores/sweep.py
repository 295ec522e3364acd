"""Builds the page of `meltcore bench --sweep`: output rate over concurrency and output length, by temperature."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from meltcore.measure.documents.score import GpuScore, ScoredRun, ScoreLevel, SweepGrid
from meltcore.measure.documents.values.formatting import (
    format_counts,
    format_duration,
    format_number,
    format_setting,
    format_time,
)
from meltcore.measure.documents.verdicts import Style, style_of
from meltcore.measure.report.load.run import machine_section, notes_box
from meltcore.measure.report.page.charts_isometric import isometric_bars
from meltcore.measure.report.page.page import (
    Block,
    Box,
    Cell,
    Column,
    Facts,
    Figure,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
    numeric_columns,
    percentile_cell,
)

_ROW_TITLE, _COLUMN_TITLE = "Concurrent requests", "Output tokens per request"
_METHOD = (
    "Every cell is a closed loop of as many requests as its concurrency; each finished request is replaced "
    "immediately. Prompts are random tokens of one length, end tokens are ignored, and the window begins when as many "
    "requests have ended as run concurrently. A sweep has no score and ranks with nothing."
)


def sweep_page(result: ScoredRun) -> Page:
    """Build the page: warnings, the charts and cells of each device, then the settings."""
    score, grid = result.score, result.score.grid
    assert grid is not None, "only sweeps have this page"
    gpu_names = format_counts([device.name for device in score.devices])
    max_rate = max((level.output_tokens_per_s for device in score.devices for level in device.sweep), default=None)
    style: Style = "plain" if result.verdict == "OK" else style_of(result.verdict)
    reason_boxes = [Box("bad", "Reasons to distrust this run", items=result.reasons)] if result.reasons else []
    details = [score.workload, score.model, score.dtype, f"{score.weights} weights", f"engine {score.engine}"]
    conclusion = (
        "no cell was measured" if max_rate is None else f"up to {format_number(max_rate)} output tokens/s in a cell"
    )
    return Page(
        title=f"sweep – {gpu_names} – {score.workload}",
        name="load sweep",
        subtitle=f"{format_time(result.started)} · {format_duration(result.duration_s)}",
        badge="SWEEP" if result.verdict == "OK" else str(result.verdict),
        style=style,
        conclusion=f"{conclusion}  ({', '.join(details)})",
        sections=[
            Section(blocks=[*reason_boxes, *notes_box(result.notes), Text(" · ".join(details), "small")]),
            *(_device_section(device, grid) for device in score.devices),
            Section(
                column_sections=[
                    machine_section(result.fingerprint),
                    Section("What was run", [Facts(_setting_facts(score.devices[0], grid))]),
                ]
            ),
            Section(blocks=[Text(_METHOD, "small")], console=False),
        ],
        footer=f"meltcore {result.fingerprint.versions['meltcore']} · result schema {result.schema_version} · the same "
        "numbers stand in result.json · nothing was uploaded",
    )


def sweep_charts(device: GpuScore, grid: SweepGrid) -> list[Figure]:
    """Draw one isometric chart per temperature, all with the same scale, or an empty list if no cell was measured."""
    highest = max((level.output_tokens_per_s for level in device.sweep), default=0.0)
    figures = []
    for index, temperature in enumerate(grid.temperatures):
        # The longest output is left, so that its higher bars hide no others.
        lengths = grid.output_lens[::-1]
        values = {
            (grid.concurrency.index(level.concurrency), lengths.index(level.output_len or 0)): level.output_tokens_per_s
            for level in device.sweep
            if level.temperature == temperature
        }
        if values:
            chart = isometric_bars(
                [f"{value:,}" for value in grid.concurrency],
                [f"{value:,}" for value in lengths],
                values,
                label=f"{device.label}: output tokens per second at temperature {temperature:g}",
                row_title=_ROW_TITLE,
                column_title=_COLUMN_TITLE,
                unit="tok/s",
                color=index + 1,
                highest=highest,
            )
            name = f"{temperature:g}{' (greedy)' * (temperature == 0)}"
            figures.append(Figure(f"Output tokens per second, temperature {name}", chart))
    return figures


def temperature_lines(device: GpuScore, grid: SweepGrid) -> list[str]:
    """Return one line per temperature after the first: its output rate relative to the first temperature's.

    A line has the median and the range of the ratios over all loads.
    """
    rates = {
        (level.temperature, level.concurrency, level.output_len): level.output_tokens_per_s for level in device.sweep
    }
    first_temperature, *other_temperatures = grid.temperatures
    lines = []
    for temperature in other_temperatures:
        ratios = [
            rate / rates[first_temperature, concurrency, length]
            for (cell_temperature, concurrency, length), rate in rates.items()
            if cell_temperature == temperature and rates.get((first_temperature, concurrency, length))
        ]
        if ratios:
            lines.append(
                f"Temperature {temperature:g}: {median(ratios):.2f} × the rate of temperature {first_temperature:g} "
                "(median of "
                f"{len(ratios)} loads, {min(ratios):.2f} to {max(ratios):.2f})."
            )
    return lines


def device_warnings(device: GpuScore) -> list[Block]:
    """Return boxes with the failure of a device, and with the reasons against its health."""
    failure = [Box("bad", text=device.failure, console=False)] if device.failure else []
    if device.health is None or not device.health.reasons:
        return [*failure]
    return [*failure, Box(style_of(device.health.verdict), items=device.health.reasons)]


def _device_section(device: GpuScore, grid: SweepGrid) -> Section:
    lines = [Text(line, "small") for line in temperature_lines(device, grid)]
    blocks = [*device_warnings(device), Figures(sweep_charts(device, grid)), *lines, _cell_table(device.sweep)]
    return Section(f"{device.label}: {device.name}", blocks)


def _cell_table(levels: Sequence[ScoreLevel]) -> Table:
    columns = [
        Column("Concurrency", console="conn."),
        Column("Output length", console="output\nlength"),
        Column("Temperature", console="temp."),
        Column("Output tok/s", console="output\ntok/s"),
        Column("Requests/s", console="req/s"),
        Column("TTFT p50, ms", console="TTFT\np50 ms"),
        Column("ITL p50, ms", console="ITL\np50 ms"),
        *numeric_columns("W", "SM active, %", "Ramp, s", "Window, s", "Ended", console=None),
    ]
    rows = [
        Row(
            [
                f"{level.concurrency:,}",
                f"{level.output_len:,}",
                f"{level.temperature:g}",
                Cell(format_number(level.output_tokens_per_s)),
                format_number(level.requests_per_s),
                percentile_cell(level.ttft_ms, "p50"),
                percentile_cell(level.itl_ms, "p50"),
                format_number(level.power_w),
                format_number(level.utilization.get("sm_active_percent")),
                format_number(level.ramp_s) + " cut" * level.ramp_cut,
                format_number(level.window_s),
                f"{level.finished:,}",
            ]
        )
        for level in levels
    ]
    note = "Cut: half of a cell's time passed before its ramp was over; a longer --duration leaves the ramp out."
    return Table(columns, rows, note=note * any(level.ramp_cut for level in levels), is_compact=True)


def _setting_facts(device: GpuScore, grid: SweepGrid) -> list[tuple[str, str]]:
    return [
        ("Concurrency", ", ".join(f"{value:,}" for value in grid.concurrency)),
        ("Output length", ", ".join(f"{value:,}" for value in grid.output_lens)),
        ("Temperature", ", ".join(f"{value:g}" for value in grid.temperatures)),
        ("Prompt", f"{grid.prompt_tokens} random tokens"),
        ("Time per cell", f"{grid.cell_s:.1f} s"),
        *((name, format_setting(value)) for name, value in device.engine_settings.items()),
    ]
