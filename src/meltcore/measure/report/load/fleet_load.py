"""Builds the page of a load on a fleet, for HTML and the console: health, levels and interference."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meltcore.measure.documents.schema import CheckResult, FleetExperiment, FleetLoad, Interference, StreamLoad
from meltcore.measure.documents.values.formatting import (
    NOT_MEASURED,
    caution_lines,
    format_duration,
    format_number,
    format_percent,
    format_setting,
    format_time,
)
from meltcore.measure.load.tasks.task import define_metric, first_latency, task_of, tasks
from meltcore.measure.report.load.fleet_levels import LOSS_TEXT, latency_cells, part_section
from meltcore.measure.report.load.run import cautions_box, machine_section, notes_box, verdict_badge
from meltcore.measure.report.page.page import (
    Block,
    Box,
    Cell,
    Column,
    Details,
    Facts,
    Page,
    Row,
    Section,
    Table,
    Text,
    Tiles,
    numeric_columns,
    percentile_cell,
    verdict_cell,
)

_PAIR_TEXT = (
    "Each cell: p95 of the victim's end-to-end latency beside the aggressor, as a multiple of p95 alone, and its "
    "throughput as a share of alone. Both are closed loops of as many connections."
)

_BOUND_TEXT = (
    "Simulated: an ideal scheduler serves the same arrivals with the step costs that each model had alone. At the end "
    "of each step urgent streams go first; steps do not overlap, and nothing is lost between them. Overlapping steps "
    "may exceed this bound, but not the bytes and operations of the GPU. A simulation that does not give what was "
    "measured alone is no bound."
)


def fleet_load_page(result: FleetLoad) -> Page:
    """Return the page of a load on a fleet. It begins with the health of models and the limits of experiments."""
    sections = [
        Section(blocks=[*_warnings(result), *([Tiles(_tiles(result))] if result.levels else [])]),
        Section("Health", [_gate_table(result.health, "model"), Text(LOSS_TEXT, "small")]),
        *_experiment_sections(result),
        *(part_section(result.levels, part) for part in ("mixed", "per-model", "interference")),
        *_matrix_sections(result.interference),
        Section("Models", [_models(result)]),
        Section(column_sections=[machine_section(result.fingerprint), _settings(result)]),
        Section("What the words mean", [Facts(_definitions())]),
    ]
    badge, style = verdict_badge(result.verdict, _cautions(result))
    fleet_line = next((line for line in result.health if line.name == "fleet"), None)
    return Page(
        title=f"meltcore load --fleet – {format_time(result.started)}",
        name="load of a fleet",
        subtitle=" · ".join(
            [format_time(result.started), format_duration(result.duration_s), f"{len(result.models)} models"]
        ),
        badge=badge,
        style=style,
        sections=[section for section in sections if section.blocks or section.column_sections],
        footer=f"meltcore {result.fingerprint.versions['meltcore']} · result schema {result.schema_version} · "
        "the same numbers stand in result.json",
        conclusion="" if fleet_line is None else fleet_line.detail,
    )


def _warnings(result: FleetLoad) -> list[Block]:
    doubts = [
        f"{level.label}, {load.name}: {load.level.verdict}: {'; '.join(load.level.reasons)}"
        for level in result.levels
        for load in level.streams
        if load.level.verdict not in ("OK", "FAILED")
    ]
    reasons = list(dict.fromkeys([*result.reasons, *doubts]))
    notes = [result.gpu_note, *result.notes]
    box = Box("bad", "Reasons to distrust this run", items=reasons)
    return [*([box] if reasons else []), *cautions_box(_cautions(result)), *notes_box([note for note in notes if note])]


def _cautions(result: FleetLoad) -> list[str]:
    return caution_lines([load.level for level in result.levels for load in level.streams])


def _tiles(result: FleetLoad) -> list[tuple[str, str, str]]:
    loads = [load for level in result.levels for load in level.streams]
    requests, lost, refused = (
        sum(getattr(load.level if name == "requests" else load, name) for load in loads)
        for name in ("requests", "lost", "refused")
    )
    peak = max((level.peak_in_flight for level in result.levels), default=0)
    connections = max((level.connections for level in result.levels), default=0)
    return [
        ("Lost requests", f"{lost:,}", f"of {requests:,} in the levels below"),
        ("Refused at first", f"{refused:,}", "Retry-After obeyed, sent again"),
        ("Most connections", f"{connections:,}", f"{peak:,} requests in flight"),
    ]


def _gate_table(gates: Sequence[CheckResult], head: str) -> Table:
    columns = [Column(head, align="text"), Column("verdict"), Column("numbers and limits", align="text")]
    rows = [Row([gate.name, verdict_cell(gate.status), gate.detail]) for gate in gates]
    return Table(columns, rows, is_stacked=True)


def _experiment_sections(result: FleetLoad) -> list[Section]:
    experiment = result.experiment
    if experiment is None:
        return []
    columns = [
        *(Column(head, align="text") for head in ("stream", "load")),
        Column("run"),
        Column("requests", console="sent"),
        Column("throughput", console="rate"),
        *numeric_columns("p50", "p95", "p99", group="First token or audio, ms", console=None),
        *numeric_columns("p50", "p95", "p99", group="End to end, ms"),
        Column("n", console="n"),
        *(Column(head, "Per step", console=None) for head in ("rows", "prompt tokens")),
    ]
    rows = []
    for before, after in zip(experiment.alone, experiment.together, strict=True):
        for word, load in (("alone", before), ("together", after)):
            level = load.level
            kind = (
                f"{level.concurrency} connections" if level.rate_per_s is None else f"{level.rate_per_s:g}/s, Poisson"
            )
            cells: list[str | Cell] = [
                Cell(load.name, small_print=load.model),
                kind,
                word,
                f"{level.requests:,}",
                f"{format_number(level.steady_throughput)} {task_of(level).unit.short_unit}",
                *latency_cells(first_latency(level)),
                *latency_cells(level.e2e_ms),
                f"{level.e2e_ms.n:,}",
                *(
                    Cell(NOT_MEASURED, "faint") if each is None else format_number(each)
                    for each in (load.rows_per_step, load.prompt_tokens_per_step)
                ),
            ]
            rows.append(Row(cells, ends_group=word == "together"))
    lead = f"Each stream runs alone, then all of them together for {format_duration(experiment.send_s)}."
    blocks: list[Block] = [
        Text(lead),
        _gate_table(experiment.gates, "limit"),
        Table(columns, rows, is_compact=True),
        *_bound_blocks(experiment),
    ]
    return [Section(f"Interference: {experiment.name}", blocks)]


def _bound_blocks(experiment: FleetExperiment) -> list[Block]:
    """Return the table of what was measured beside what an ideal scheduler gives the same arrivals.

    A simulation that is no bound shows only where it differs from what was measured alone.
    """
    error = experiment.simulation_error
    errors: list[Block] = [Text(error[:1].upper() + error[1:] + ".")] if error else []
    if not experiment.simulated:
        return errors
    columns = [
        Column("stream", align="text"),
        Column("", align="text"),
        *(Column(head, console=head) for head in ("measured", "simulated", "ratio")),
    ]
    rows = []
    for before, after, ideal in zip(experiment.alone, experiment.together, experiment.simulated, strict=True):
        for label, measured_alone, ideal_alone in ideal.pairs_alone(before):
            rows.append(_bound_row(after, f"alone: {label}", measured_alone, ideal_alone, format_number))
        outside = [("alone: outside of steps, ms", ideal.outside_ms)]
        if before.level.task is None:
            outside.append(("alone: the same until the first token, ms", ideal.first_outside_ms))
        stream = Cell(after.name, small_print=after.model)
        rows += [Row([stream, label, "", format_number(outside_ms), ""]) for label, outside_ms in outside]
        if error:
            continue
        alone = before.level.steady_throughput
        share = after.level.steady_throughput / alone if alone else None
        for label, bound in (
            ("share of its throughput alone", ideal.throughput_ratio),
            ("at most, by the bytes that steps read", ideal.bytes_ratio),
            ("at most, by the operations of steps", ideal.flops_ratio),
        ):
            if bound is not None:
                rows.append(_bound_row(after, label, share, bound, format_percent))
        latencies = [("first token", after.level.ttft_ms, ideal.first_ms)] if after.level.task is None else []
        for word, measured, simulated in [*latencies, ("end to end", after.level.e2e_ms, ideal.e2e_ms)]:
            for name in ("p50", "p95"):
                measured_ms, ideal_ms = getattr(measured, name), getattr(simulated, name)
                rows.append(_bound_row(after, f"{word}, {name}, ms", measured_ms, ideal_ms, format_number))
    return [*errors, Text(_BOUND_TEXT, "small"), Table(columns, rows, is_compact=True)]


def _bound_row(
    load: StreamLoad, label: str, measured: float | None, ideal: float | None, form: Callable[[float], str]
) -> Row:
    cells = [Cell("n too small", "faint") if each is None else form(each) for each in (measured, ideal)]
    ratio = f"{measured / ideal:.2f} x" if measured is not None and ideal else ""
    return Row([Cell(load.name, small_print=load.model), label, *cells, ratio])


def _matrix_sections(pairs: Sequence[Interference]) -> list[Section]:
    if not pairs:
        return []
    names = list(dict.fromkeys(name for pair in pairs for name in (pair.victim, pair.aggressor)))
    by_names = {(pair.victim, pair.aggressor): pair for pair in pairs}
    columns = [
        Column("victim \\ aggressor", align="text", console=None),
        *(Column(name, console=None) for name in names),
    ]
    rows = []
    for victim in names:
        cells: list[str | Cell] = [victim]
        for aggressor in names:
            pair = by_names.get((victim, aggressor))
            cells.append(Cell("") if pair is None else Cell(_ratio_text(pair), small_print=_share_text(pair)))
        rows.append(Row(cells))
    grid = Table(columns, rows, note=_PAIR_TEXT, is_compact=True, console=False)
    return [Section("Interference of pairs", [grid, _pair_list(pairs)])]


def _pair_list(pairs: Sequence[Interference]) -> Table:
    groups = ("p95, ms", "p99, ms", "First p95, ms")
    columns = [
        Column("victim", align="text"),
        Column("beside", align="text"),
        *(
            Column(head, group, console=f"{group[:3]}\n{head}" if group == groups[0] else None)
            for group in groups
            for head in ("alone", "beside")
        ),
        Column("n"),
        Column("p95 ratio", console="p95\nratio"),
        Column("throughput of alone", console="rate"),
    ]
    rows = []
    for pair in pairs:
        levels = (pair.alone.level, pair.beside.level)
        first = [first_latency(level) for level in levels]
        cells: list[str | Cell] = [
            pair.victim,
            pair.aggressor,
            *(percentile_cell(level.e2e_ms, name) for name in ("p95", "p99") for level in levels),
            *(Cell(NOT_MEASURED, "faint") if each is None else percentile_cell(each, "p95") for each in first),
            " / ".join(f"{level.e2e_ms.n:,}" for level in levels),
            _ratio_text(pair),
            _share_text(pair),
        ]
        rows.append(Row(cells))
    return Table(columns, rows, is_compact=True)


def _ratio_text(pair: Interference) -> str:
    alone, beside = pair.alone.level.e2e_ms.p95, pair.beside.level.e2e_ms.p95
    return "n too small" if not alone or beside is None else f"{beside / alone:.2f} x"


def _share_text(pair: Interference) -> str:
    alone = pair.alone.level.steady_throughput
    return format_percent(pair.beside.level.steady_throughput / alone) if alone else NOT_MEASURED


def _models(result: FleetLoad) -> Table:
    columns = [
        *(Column(head, align="text") for head in ("model", "task")),
        Column("share of mixed", console="share"),
        Column("workload", align="text", console=None),
        Column("server says", align="text", console=None),
    ]
    rows = [
        Row(
            [
                model.name,
                model.task,
                format_percent(round(model.share, 4)),
                model.workload,
                ", ".join(f"{name} {format_setting(value)}" for name, value in model.facts.items()),
            ]
        )
        for model in result.models
    ]
    return Table(columns, rows)


def _settings(result: FleetLoad) -> Section:
    facts = [(name.replace("_", " "), format_setting(value)) for name, value in result.settings.items()]
    return Section("Settings", [Details("All settings", [Facts(facts)], is_open=True)])


def _definitions() -> list[tuple[str, str]]:
    first_keys = (task.first_key for task in tasks().values() if task.first_key is not None)
    keys = (*first_keys, "e2e_ms", *(task.unit.key for task in tasks().values()))
    return [(f"{each.name} ({each.unit})", each.text) for each in map(define_metric, keys)]
