"""Builds the page of a GPU score and its lines on the console: the score, its parts, and reasons to doubt it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from meltcore.measure.documents.schema import Distribution
from meltcore.measure.documents.score import (
    ANY_KERNEL,
    DRAM_ACTIVE,
    SM_ACTIVE,
    TENSOR_ACTIVE,
    GpuScore,
    MetricRow,
    Score,
    ScoredRun,
    ScoreLevel,
)
from meltcore.measure.documents.values.definitions import SCORE_DEFINITIONS
from meltcore.measure.documents.values.formatting import (
    NOT_MEASURED,
    format_change,
    format_counts,
    format_duration,
    format_number,
    format_percent,
    format_percentile,
    format_setting,
    format_time,
)
from meltcore.measure.documents.values.percentiles import SAMPLES_NEEDED, TOO_SMALL
from meltcore.measure.documents.values.scores import expectations, ratio_line, totals, totals_line
from meltcore.measure.documents.verdicts import Style, style_of
from meltcore.measure.report.load.run import machine_section, notes_box
from meltcore.measure.report.page.charts import NUM_COLORS, Frame, Line, Mark, Strip, line_chart, time_strips
from meltcore.measure.report.page.page import (
    TOO_FEW_MARK,
    Block,
    Box,
    Cell,
    Checks,
    Column,
    Details,
    Facts,
    Figure,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
    Tiles,
    format_reading,
    numeric_columns,
    percentile_cell,
)
from meltcore.measure.report.scores.sweep import device_warnings, sweep_page

_TIME_FRAME = Frame(1120, 0, 64, 1104, 0, 0)
# What the summary line says of the sustained window, and of clock reasons that are no fault.
_SUMMARY_METRICS = {"power_w": "", "temperature_c": "", "memory_temperature_c": "memory ", "sm_clock_mhz": "SM clock "}
_CLOCK_REASON_TEXTS = {
    "SW_POWER_CAP": "clocks held by the power limit (SW_POWER_CAP, as designed)",
    "GPU_IDLE": "idle (GPU_IDLE)",
}
# (title, the (key, name, color) of each line, the least end of the axis, filled: for what adds up over time)
_TIME_STRIPS = (
    ("output tokens/s", [("output_tokens_per_s", "", 1)], 0.0, True),
    ("power, W", [("power_w", "", 2)], 0.0, True),
    ("temperature, °C", [("temperature_c", "GPU", 4), ("memory_temperature_c", "memory", 3)], 0.0, False),
    ("SM clock, MHz", [("sm_clock_mhz", "", 3)], 0.0, False),
    ("memory clock, MHz", [("memory_clock_mhz", "", 2)], 0.0, False),
    (
        "share of time or peak, %",
        [
            (SM_ACTIVE, "SM active", 1),
            (DRAM_ACTIVE, "DRAM bandwidth", 2),
            (TENSOR_ACTIVE, "tensor cores", 3),
            ("sm_occupancy_percent", "SM occupancy", 4),
        ],
        100.0,
        False,
    ),
    ("NVML GPU utilization: time in which any kernel ran, %", [(ANY_KERNEL, "", 4)], 100.0, False),
)
# (key, name, color, dashed) of the utilization panel and table. The colors are those of the strips.
_UTILIZATION_LINES = (
    (SM_ACTIVE, "SM active", 1, False),
    (DRAM_ACTIVE, "DRAM bandwidth", 2, False),
    (TENSOR_ACTIVE, "tensor cores", 3, False),
    (ANY_KERNEL, "any kernel ran (NVML)", 4, True),
)
_UTILIZATION_NOTE = (
    "SM active, tensor cores and DRAM bandwidth are NVML's GPM counters: the share of time, of tensor cycles and of "
    "peak bandwidth, over all SMs. NVML's own GPU utilization is the time in which any kernel ran: one thread makes "
    "it 100 %."
)


def score_page(result: ScoredRun) -> Page:
    """Build the page of a score: warnings, the score, then each device. A sweep has another page."""
    score = result.score
    if score.grid is not None:
        return sweep_page(result)
    gpu_names = format_counts([device.name for device in score.devices])
    rate_text = "no score" if score.output_tokens_per_s is None else format_number(score.output_tokens_per_s)
    details = [score.workload, score.model, score.dtype, f"{score.weights} weights", f"engine {score.engine}"]
    if result.verdict != "OK":
        badge, style = str(result.verdict), style_of(result.verdict)
    elif all(device.health is None for device in score.devices):
        badge, style = "NOT COMPARABLE", style_of("UNKNOWN")
    else:
        badge, style = score.health, style_of(score.health)
    not_comparable = Box("unsure", "NOT COMPARABLE: this number ranks with no other", items=score.not_comparable)
    reasons_box = Box("bad", "Reasons to distrust this run", items=result.reasons)
    warnings: list[Block] = [box for box in (not_comparable, reasons_box) if box.items]
    figures = score_charts(score.devices)
    return Page(
        title=f"{rate_text}{' tok/s' * (rate_text != 'no score')} – {gpu_names} – {score.workload}",
        name="GPU score",
        subtitle=f"{format_time(result.started)} · {format_duration(result.duration_s)}",
        badge=badge,
        style=style,
        device=gpu_names,
        score=rate_text,
        unit="output tokens per second" if rate_text != "no score" else "",
        details=" · ".join(details),
        conclusion=f"{rate_text}{' output tokens/s' * (rate_text != 'no score')}  ({', '.join(details)})",
        sections=[
            Section(blocks=[*warnings, *notes_box(result.notes), Tiles(score_tiles(score)), *summary_sections(score)]),
            *([Section("The ladder", [Figures(figures)])] if figures else []),
            *map(_device_section, score.devices),
            Section(
                column_sections=[
                    machine_section(result.fingerprint),
                    Section("What was run", [Facts(_setting_facts(score))]),
                ]
            ),
            Section("What the words mean", [Facts(_definition_facts())]),
        ],
        footer=f"meltcore {result.fingerprint.versions['meltcore']} · result schema {result.schema_version} · the same "
        "numbers stand in result.json · nothing was uploaded",
    )


def level_line(label: str, level: ScoreLevel, is_sustained: bool) -> str:
    """Format a finished level as one line: concurrency, output rate, median latencies."""
    description = "sustained" if is_sustained else ""
    if level.output_len is not None:
        description = f"output length {level.output_len:>5,} temperature {level.temperature:<4g}"
    latencies = (("ITL", level.itl_ms, 5), ("TTFT", level.ttft_ms, 6))
    parts = [
        f"{label:<7} concurrency {level.concurrency:>6,} {description:<9}",
        f"{format_number(level.output_tokens_per_s):>8} tok/s",
        *(
            f"{name} {cell.console_text or cell.text:>{width}}" + (" ms" if distribution.p50 is not None else "   ")
            for name, distribution, width in latencies
            for cell in [percentile_cell(distribution, "p50")]
        ),
    ]
    return "  ".join(parts).rstrip()


def score_tiles(score: Score) -> list[tuple[str, str, str]]:
    """Return a tile (label, value, small print) per number of the sustained run. Latencies are the slowest device's."""
    runs = [device.sustained for device in score.devices if device.sustained is not None]
    if not runs:
        return []
    slowest = min(runs, key=lambda run: run.output_tokens_per_s)
    in_flight = " and ".join(sorted({f"{run.concurrency:,}" for run in runs}))
    device_note = "" if len(runs) == 1 else ", of the slowest"
    queue_note = ", queueing" * any(_is_saturated(device) for device in score.devices)
    ttft, itl = slowest.ttft_ms, slowest.itl_ms
    tiles = [
        ("Requests per second", format_number(sum(run.requests_per_s for run in runs)), f"{in_flight} in flight"),
        ("Total tokens/s", format_number(sum(run.total_tokens_per_s for run in runs)), "prompt and output"),
        (
            "TTFT p50",
            format_percentile_ms(ttft, "p50"),
            f"p99 {format_percentile_ms(ttft, 'p99')}{device_note}{queue_note}",
        ),
        ("ITL p50", format_percentile_ms(itl, "p50"), f"p99 {format_percentile_ms(itl, 'p99')}{device_note}"),
    ]
    powers = [run.power_w for run in runs if run.power_w is not None]
    if score.tokens_per_joule is not None and powers:
        tiles.append(("Tokens per joule", format_number(score.tokens_per_joule), f"at {sum(powers):,.0f} W"))
    spreads = [device.spread for device in score.devices if device.spread is not None]
    if spreads:
        worst = max(spreads, key=lambda spread: spread.variation)
        trend = "too short for a trend" if worst.change is None else f"last third {format_change(worst.change)}"
        tiles.append(("Varies over time by", f"{100 * worst.variation:.1f} %", trend))
    return tiles


def score_charts(devices: Sequence[GpuScore]) -> list[Figure]:
    """Draw the throughput of every device, and utilization, latencies and energy of the first, over concurrency."""
    measured_devices = [device for device in devices if len(device.levels) > 1]
    if not measured_devices:
        return []
    first_device, device_note = measured_devices[0], "" if len(devices) == 1 else f", {measured_devices[0].label}"
    rates = [
        _level_line(device.label, index % NUM_COLORS + 1, device, lambda level: level.output_tokens_per_s, "tok/s")
        for index, device in enumerate(measured_devices)
    ]
    panels = [
        ("Output tokens per second", "tok/s", rates),
        (f"Utilization{device_note}", "%", _utilization_lines(first_device)),
        (f"Time to first token{device_note}", "ms", _latency_lines(first_device, "ttft_ms")),
        (f"Inter-token latency{device_note}", "ms", _latency_lines(first_device, "itl_ms")),
        (
            f"Tokens per joule{device_note}",
            "tok/J",
            [_level_line("tokens per joule", 3, first_device, lambda level: level.tokens_per_joule, "tok/J")],
        ),
    ]
    return [
        Figure(title, chart, [(line.name, line.color, line.dashed) for line in lines if line.marks and len(lines) > 1],
               note=_UTILIZATION_NOTE * (unit == "%"))
        for title, unit, lines in panels
        if (chart := line_chart(lines, label=f"{title} against concurrency", x_title="Concurrent requests", unit=unit,
                                log_y=unit == "ms")) is not None
    ]  # fmt: skip


def gpu_timeline_figure(device: GpuScore) -> Figure | None:
    """Draw all metrics over the whole run, with the scored windows shaded. Returns None if nothing was recorded."""
    series = device.lines
    if series is None:
        return None
    strips = [
        Strip(title, lines, min_axis_top, is_filled)
        for title, metrics, min_axis_top, is_filled in _TIME_STRIPS
        if (lines := [
            (name, color, [((i + 0.5) * series.bucket_s, value) for i, value in enumerate(series.values[key])])
            for key, name, color in metrics
            if key in series.values
        ])
    ]  # fmt: skip
    named_levels = [(level, f"{level.concurrency:,}") for level in device.levels]
    named_levels += [
        (run, f"sustained, concurrency {run.concurrency:,}") for run in [device.sustained] if run is not None
    ]
    spans = [
        (level.start_s + level.ramp_s, level.end_s, f"counted: {name}, {level.window_s:.1f} s", name)
        for level, name in named_levels
    ]
    spread = ""
    if device.spread is not None:
        rates = device.spread.rates
        spread = (
            f"{len(rates)} intervals of {device.spread.bucket_s:.0f} s: "
            f"{format_number(min(rates))} to {format_number(max(rates))} "
            "output tokens/s. "
        )
    chart = time_strips(
        strips,
        duration_s=series.bucket_s * len(next(iter(series.values.values()))),
        label=f"{device.label}: the whole run over time",
        x_title="seconds",
        frame=_TIME_FRAME,
        spans=spans,
    )
    caption = (
        f"Shaded: the windows that count, named by the requests in flight. {spread}Requests that began together end "
        "together, so the rate swings from round to round."
    )
    return Figure("Over time", chart, caption=caption)


def format_percentile_ms(distribution: Distribution, name: str) -> str:
    """Format a percentile in milliseconds, or in seconds if at least 10 s."""
    formatted = format_percentile(distribution, name)
    if formatted in (TOO_SMALL, NOT_MEASURED):
        return formatted
    value_ms = getattr(distribution, name)
    return f"{formatted} ms" if value_ms < 10_000 else f"{value_ms / 1000:.1f} s"


def _device_section(device: GpuScore) -> Section:
    blocks, health = device_warnings(device), device.health
    if device.spread is not None:
        trend = "" if device.spread.change is None else f", last third {format_change(device.spread.change)}"
        blocks.append(Text(f"Over time: varies by {100 * device.spread.variation:.1f} %{trend}.", "small"))
    blocks += [Text(line, "small") for line in [_summary_line(device)] if line]
    blocks += [figure for figure in [gpu_timeline_figure(device)] if figure is not None]
    if device.levels or device.sustained is not None:
        blocks += [_levels_table(device), *_utilization_table(device)]
    if health is not None:
        columns = [Column("Metric"), *numeric_columns("mean", "maximum", "")]
        note = " shown, never judged"
        rows = [Row([row.name + note * bool(row.note), *_metric_cells(row)]) for row in health.metrics]
        reasons = ", ".join(
            f"{reason} in {format_percent(fraction)} of the samples"
            for reason, fraction in health.clock_reasons.items()
        )
        facts = [("Clock reasons", reasons or "none")]
        if health.xids is not None:
            facts.append(("XID errors", f"{', '.join(map(str, health.xids)) or 'none'} in the whole run"))
        if device.measurer_lag_p99_ms is not None:
            facts.append(
                ("Measurer", f"read a step {format_number(device.measurer_lag_p99_ms)} ms after its time at p99")
            )
        summary_sections = f"Telemetry of the sustained window, {health.samples:,} samples in the whole run"
        blocks.append(Details(summary_sections, [Table(columns, rows), Facts(facts)]))
    tag: tuple[str, Style] = ("", "") if health is None else (health.verdict, style_of(health.verdict))
    return Section(f"{device.label}: {device.name}", blocks, *tag)


def _levels_table(device: GpuScore) -> Table:
    columns = [
        Column("Concurrency", console="conn."),
        *(
            Column(token_type, "Tokens/s", console=f"{token_type}\ntok/s") for token_type in ("output", "total")
        ),
        Column("Requests/s", console="req/s"),
        *(
            Column(name, f"{group}, ms", console=f"{group}\np50 ms" if name == "p50" else "\np99 ms")
            for group in ("TTFT", "ITL")
            for name in ("p50", "p99")
        ),
        *numeric_columns("p50", "p99", group="End to end, ms", console=None),
        *numeric_columns("W", "tok/J", group="Energy"),
        Column("ramp", "Seconds", console=" "),
        Column("window", "Seconds", console=None),
        Column("Ended", console=None),
    ]  # fmt: skip
    levels = [*device.levels, *([] if device.sustained is None else [device.sustained])]
    rows = []
    for level in levels:
        is_sustained = level is device.sustained
        rates = (level.output_tokens_per_s, level.total_tokens_per_s, level.requests_per_s)
        latencies = (level.ttft_ms, level.itl_ms, level.e2e_ms)
        ramp_note = "sustained" if is_sustained else "ramp cut" if level.ramp_cut else " "
        cells: list[str | Cell] = [
            Cell(f"{level.concurrency:,}{' sustained' * is_sustained}", console_text=f"{level.concurrency:,}"),
            *map(format_number, rates),
            *(percentile_cell(distribution, name) for distribution in latencies for name in ("p50", "p99")),
            format_number(level.power_w),
            format_number(level.tokens_per_joule),
            Cell(format_number(level.ramp_s) + " cut" * level.ramp_cut, console_text=ramp_note),
            format_number(level.window_s),
            Cell(f"{level.finished:,}", small_print=f"{level.waiting:,} without a token" * bool(level.waiting)),
        ]
        rows.append(Row(cells, is_emphasized=is_sustained, ends_group=level is levels[-1]))
    return Table(columns, rows, is_compact=True)


def _utilization_table(device: GpuScore) -> list[Table]:
    """Build a table with the mean utilization of each window. Returns an empty list if nothing was measured."""
    columns = [
        Column("Concurrency", console="conn."),
        Column("Output tok/s", console="output\ntok/s"),
        *(Column(name, "Mean of the window, %", console=name.replace(" ", "\n")) for _, name, *_ in _UTILIZATION_LINES),
    ]
    rows = []
    for level in [*device.levels, *([] if device.sustained is None else [device.sustained])]:
        mean_values = [device.mean_utilization(level, key) for key, *_ in _UTILIZATION_LINES]
        if any(mean is not None for mean in mean_values):
            name = f"{level.concurrency:,}{' sustained' * (level is device.sustained)}"
            cells: list[str | Cell] = [
                Cell(name, console_text=f"{level.concurrency:,}"),
                format_number(level.output_tokens_per_s),
            ]
            rows.append(Row([*cells, *map(format_number, mean_values)], is_emphasized=level is device.sustained))
    return [Table(columns, rows, note=_UTILIZATION_NOTE, is_compact=True)] if rows else []


def _is_saturated(device: GpuScore) -> bool:
    """Return whether the requests in flight were more than twice the engine's limit of running requests.

    On a saturated device a request waits longer than it runs.
    """
    max_num_seqs = device.engine_settings.get("max_num_seqs")
    return (
        device.sustained is not None
        and isinstance(max_num_seqs, int)
        and device.sustained.concurrency > 2 * max_num_seqs
    )


def _summary_line(device: GpuScore) -> str:
    """Return one line about the GPU in the sustained window, or "" if nothing was measured."""
    if device.health is None or device.sustained is None:
        return ""
    rows = {row.key: row for row in device.health.metrics}
    parts = [
        f"{name}{format_reading(row.mean)} {row.unit} (at most {format_reading(row.maximum)})"
        for key, name in _SUMMARY_METRICS.items()
        if (row := rows.get(key)) is not None and row.mean is not None
    ]
    parts += [
        f"{_CLOCK_REASON_TEXTS.get(reason, f'clocks held by {reason}')} in {format_percent(fraction)} of the samples"
        for reason, fraction in device.health.clock_reasons.items()
    ]
    return f"In the sustained window: {', '.join(parts)}." if parts else ""


def _level_line(
    name: str, color: int, device: GpuScore, get_value: Callable[[ScoreLevel], float | None], unit: str
) -> Line:
    return Line(
        name,
        color,
        [
            Mark(level.concurrency, value, f"concurrency {level.concurrency:,}: {name} {format_number(value)} {unit}")
            for level in device.levels
            if (value := get_value(level)) is not None
        ],
    )


def _utilization_lines(device: GpuScore) -> list[Line]:
    return [
        replace(_level_line(name, color, device, partial(device.mean_utilization, key=key), "%"), dashed=dashed)
        for key, name, color, dashed in _UTILIZATION_LINES
    ]


def _latency_lines(device: GpuScore, key: str) -> list[Line]:
    return [
        _level_line("p50", 1, device, lambda level: getattr(level, key).p50, "ms"),
        _level_line("p99", 2, device, lambda level: getattr(level, key).p99, "ms"),
    ]


def _metric_cells(row: MetricRow) -> tuple[str, str, str]:
    """Return mean, maximum and unit of one metric as text.

    A counter has its increase, with a plus sign, in place of the mean.
    """
    scale, unit = (2.0**-30, "GiB") if row.unit == "bytes" else (1.0, row.unit)
    if row.absent is not None:
        return row.absent, "", ""
    if row.increase is not None:
        return f"+{format_number(row.increase * scale)}", "", unit
    mean, maximum = (None if value is None else value * scale for value in (row.mean, row.maximum))
    return format_reading(mean), format_reading(maximum), unit


def _setting_facts(score: Score) -> list[tuple[str, str]]:
    return [
        ("Workload", score.workload),
        *_prompt_file_facts(score),
        ("Model", f"{score.model}, {score.weights} weights, {score.dtype}"),
        ("Engine", f"meltcore {score.engine}"),
        ("Requested duration", format_duration(score.duration_s)),
        *((name, format_setting(value)) for name, value in score.devices[0].engine_settings.items()),
    ]


def _prompt_file_facts(score: Score) -> list[tuple[str, str]]:
    prompt_file = score.prompt_file
    if prompt_file is None:
        return []
    lengths = (
        f"{prompt_file.min_tokens:,} to {prompt_file.max_tokens:,} tokens, "
        f"{format_number(prompt_file.mean_tokens)} on average"
    )
    return [("Prompts", f"{prompt_file.prompts:,} of a file: {lengths}"), ("SHA-256 of the file", prompt_file.sha256)]


def _definition_facts() -> list[tuple[str, str]]:
    too_small_text = (
        "The sample is too small for this percentile (MLPerf early stopping, 99 % confidence): p50 needs "
        f"{SAMPLES_NEEDED['p50']}, p99 {SAMPLES_NEEDED['p99']}."
    )
    return [*((definition.name, definition.text) for definition in SCORE_DEFINITIONS), (TOO_FEW_MARK, too_small_text)]


def summary_sections(score: Score) -> list[Block]:
    """Build the section of the totals and the three expectations, or no section if no device completed a window."""
    sums = totals(score)
    if not sums.output_tokens:
        return []
    lines = [Text(line, "lead") for line in (totals_line(sums), *map(ratio_line, score.references))]
    return [Section("Summary", [*lines, *expectation_blocks(score)])]


def expectation_blocks(score: Score) -> list[Block]:
    """Build one line per expectation with its verdict, and the rules in small print.

    A CPU is not judged by what is expected of GPUs: one line says how its rate varied.
    """
    results = expectations(score)
    if all(device.engine_settings.get("device") == "cpu" for device in score.devices):
        [seen] = [expectation.seen for expectation in results if expectation.name == "throughput"]
        return [Text(f"Throughput on the CPU: {seen}. The three expectations are of GPUs.", "small")]
    checks = [
        (
            style_of(expectation.verdict),
            expectation.verdict,
            expectation.name,
            f"expected {expectation.expected}: seen {expectation.seen}".replace("seen not measured", "not measured"),
        )
        for expectation in results
    ]
    rules = "; ".join(f"{expectation.name}: {expectation.rule}" for expectation in results)
    return [Checks(checks, console=True), Text(f"Rules: {rules}.", "small")]
