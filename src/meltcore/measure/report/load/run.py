"""Builds the page of one run of load, eval or demo, and its tables for the console."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.schema import (
    DemoSample,
    Fingerprint,
    FleetLevel,
    LevelResult,
    RunResult,
)
from meltcore.measure.documents.values.formatting import (
    caution_lines,
    client_line,
    eval_score_line,
    fingerprint_rows,
    format_duration,
    format_load,
    format_number,
    format_percent,
    format_setting,
    format_time,
    result_warnings,
    weighted_throughput_line,
)
from meltcore.measure.documents.values.percentiles import QUANTILES, SAMPLES_NEEDED
from meltcore.measure.documents.verdicts import Style, Verdict, style_of
from meltcore.measure.documents.weights import WEIGHTS
from meltcore.measure.load.tasks.task import by_task, default_task, task_of
from meltcore.measure.report.load.fleet_levels import LOSS_TEXT, part_section
from meltcore.measure.report.load.levels import (
    levels_tables,
    load_charts,
    named_distributions,
    offered_load,
    relevant_definitions,
    timeline_figure,
)
from meltcore.measure.report.page.page import (
    Audio,
    Block,
    Box,
    Cell,
    Checks,
    Column,
    Details,
    Facts,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
    Tiles,
    numeric_columns,
    percentile_cell,
)


def run_page(result: RunResult) -> Page:
    """Build the page of a run, warnings first."""
    evaluation_name, model = (result.settings.get(name) for name in ("what", "model"))
    badge, style = verdict_badge(result.verdict, caution_lines(all_levels(result)))
    subtitle = [format_time(result.started), format_duration(result.duration_s), *([model] if model else [])]
    sections = [
        Section(blocks=[*_warning_blocks(result), Tiles(run_tiles(result))]),
        _weighted_section(result),
        *_mixed_sections(result.mixed),
        *_load_sections(result.levels),
        Section("Levels", levels_tables(result.levels)) if result.levels else Section(),
        _timeline_section(result.levels),
        _level_details_section(result.levels),
        _answers_section(result),
        conversations_section(result.samples),
        samples_section(result.samples),
        *(
            Section(title, [Checks([(style_of(check.status), check.status, check.name, check.detail)
                                    for check in checks])])
            for title, checks in (("Gates", result.gates), ("API checks", result.checks))
            if checks
        ),
        Section(column_sections=[machine_section(result.fingerprint), _settings_section(result)]),
        Section("What the words mean", [Facts(facts)] if (facts := _definition_facts(result)) else []),
    ]  # fmt: skip
    return Page(
        title=f"meltcore {result.command} – {format_time(result.started)}",
        name=" ".join(str(part) for part in (result.command, evaluation_name) if part),
        subtitle=" · ".join(map(str, subtitle)),
        badge=badge,
        style=style,
        sections=[section for section in sections if section.blocks or section.column_sections],
        footer=f"meltcore {result.fingerprint.versions['meltcore']} · result schema {result.schema_version} · "
        "the same numbers stand in result.json",
    )


def run_tiles(result: RunResult) -> list[tuple[str, str, str]]:
    """Return a tile (label, value, small print) per important number of a run."""
    tiles: list[tuple[str, str, str]] = []
    if result.eval_score is not None:
        score = result.eval_score
        small_print = f"prompts and answers, weighted; answers alone: {format_number(score.output_tokens_per_s)}"
        tiles.append(
            ("Score", format_number(score.total_tokens_per_s), "a gate failed" if score.zero_reasons else small_print)
        )
    if result.evaluation is not None:
        evaluation = result.evaluation
        bounds = f"95 % interval {100 * evaluation.ci_low:.1f} to {100 * evaluation.ci_high:.1f} %"
        tiles.append(
            (
                "Correct answers without load",
                format_percent(evaluation.accuracy),
                f"{evaluation.correct:,} of {evaluation.total:,}; {bounds}",
            )
        )
    levels = all_levels(result)
    if levels:
        num_requests, num_failed = (sum(getattr(level, name) for level in levels) for name in ("requests", "failed"))
        for task, group in by_task(levels).items():
            best_level = max(group, key=lambda level: level.throughput)
            label = "Best throughput" if task is default_task() else f"Best throughput, {task.name}"
            load = format_load(best_level).removeprefix(f"{task.name}, ")
            tiles.append((label, format_number(best_level.throughput), f"{task.unit.unit}, {load}"))
        tiles.append(_peak_tile(result))
        if result.weighted_throughput is not None:
            total, output = (
                result.weighted_throughput.total_tokens_per_s,
                result.weighted_throughput.output_tokens_per_s,
            )
            small_print = f"total tok/s weighted, answers unchecked; output tokens alone: {format_number(output)}"
            tiles.append(("Weighted throughput", format_number(total), small_print))
        tiles.append(("Failed requests", f"{num_failed:,}", f"of {num_requests:,}"))
    if result.mixed:
        refused = sum(load.refused for level in result.mixed for load in level.streams)
        tiles.append(("Refused at first", f"{refused:,}", "Retry-After obeyed, sent again"))
    if result.checks:
        num_passed = sum(check.status == "PASS" for check in result.checks)
        num_applicable = sum(check.status != "NOT_APPLICABLE" for check in result.checks)
        tiles.append(("API checks passed", f"{num_passed} of {num_applicable}", "OpenAI forms and errors"))
    return tiles


def all_levels(result: RunResult) -> list[LevelResult]:
    """Return the levels of a run. A mixed level is replaced by the levels of its models."""
    return [*result.levels, *(load.level for level in result.mixed for load in level.streams)]


def _peak_tile(result: RunResult) -> tuple[str, str, str]:
    if result.mixed:
        mixed = max(result.mixed, key=lambda level: level.peak_in_flight)
        return "Most in flight", f"{mixed.peak_in_flight:,}", f"over {mixed.connections:,} connections, all models"
    peak = max(result.levels, key=lambda level: level.peak_in_flight)
    return "Most in flight", f"{peak.peak_in_flight:,}", f"{peak.succeeded:,} of {peak.requests:,} answered"


def machine_section(fingerprint: Fingerprint | None) -> Section:
    """Build the section with the hardware and versions of a run, or an empty list without a fingerprint."""
    facts = [] if fingerprint is None else fingerprint_rows(fingerprint)
    return Section("Machine and versions", [Facts(facts)] if facts else [])


def notes_box(notes: Sequence[str]) -> list[Block]:
    """Return a list with one box of notes, or an empty list if there are no notes."""
    return [Box(title="Read with care", items=notes)] if notes else []


def verdict_badge(verdict: Verdict, cautions: Sequence[str]) -> tuple[str, Style]:
    """Return the badge of a verdict and its style. Cautions make a good verdict an unsure one."""
    if verdict == "OK" and cautions:
        return f"{verdict}, {len(cautions)} caution{'s' * (len(cautions) > 1)}", "unsure"
    return verdict, style_of(verdict)


def cautions_box(cautions: Sequence[str]) -> list[Block]:
    """Return a list with one box of cautions, or an empty list if there are no cautions."""
    return [Box("unsure", "Cautions", items=cautions)] if cautions else []


def _warning_blocks(result: RunResult) -> list[Block]:
    reasons, cautions = result_warnings(result), caution_lines(all_levels(result))
    if reasons or cautions:
        reasons_box = Box("bad", "Reasons to distrust this run", items=reasons)
        return [*([reasons_box] if reasons else []), *cautions_box(cautions), *notes_box(result.notes)]
    clean_box = Box(
        "good",
        lead="No reason found to distrust this run.",
        text=f"Every request got its complete answer. {client_line(result.levels)} One run says "
        "nothing about the spread between runs.",
    )
    return [*([clean_box] if result.levels else []), *notes_box(result.notes)]


def _weighted_section(result: RunResult) -> Section:
    """Build the section with the weighted sum of an evaluation and one row per level."""
    if result.command != "eval" or not result.levels:
        return Section()
    title, line = "Tokens per second, both ways to count", ""
    if result.eval_score is not None:
        title, line = "Score", eval_score_line(result.eval_score)
    elif result.weighted_throughput is not None:
        title, line = "Weighted throughput", weighted_throughput_line(result.weighted_throughput)
    rows = []
    for level in result.levels:
        weight = WEIGHTS.get(level.concurrency, 0)
        rates = (level.total_tokens_per_s, level.output_tokens_per_s)
        rows.append(
            Row(
                [
                    format_load(level),
                    str(weight),
                    *(format_number(value) for rate in rates for value in (rate, weight * rate)),
                ]
            )
        )
    groups = [numeric_columns("tok/s", "weighted", group=group) for group in ("Prompts and answers", "Answers alone")]
    table = Table([*numeric_columns("Load", "weight"), *groups[0], *groups[1]], rows, is_compact=True)
    return Section(title, [*([Text(line, "lead")] if line else []), table])


def _mixed_sections(levels: Sequence[FleetLevel]) -> list[Section]:
    section = part_section(levels, "mixed")
    return [Section(section.title, [*section.blocks, Text(LOSS_TEXT, "small")])] if levels else []


def _load_sections(levels: Sequence[LevelResult]) -> list[Section]:
    figures = load_charts(levels)
    has_several_workloads = len({level.workload for level in levels}) > 1
    note = "Lines break where the workload changes; levels compare only within one workload."
    blocks: list[Block] = [*([Text(note, "small")] if has_several_workloads else []), Figures(figures)]
    return [Section("Throughput and latency against load", blocks)] if figures else []


def _timeline_section(levels: Sequence[LevelResult]) -> Section:
    figures = [figure for level in levels if (figure := timeline_figure(level)) is not None]
    note = Text("The shaded span is the steady window.", "small")
    return Section("Over time", [note, Figures(figures)]) if figures else Section()


def _level_details_section(levels: Sequence[LevelResult]) -> Section:
    names = ("p50", "p90", "p95", "p99", "p999")
    percentile_heads = [f"p{100 * QUANTILES[name]:g}" for name in names]
    details = []
    for level in sorted(levels, key=offered_load):
        rows = []
        for name, distribution in named_distributions(task_of(level), level):
            percentiles = [percentile_cell(distribution, name) for name in names]
            bounds = [format_number(value) for value in (distribution.mean, distribution.min, distribution.max)]
            rows.append(Row([name, f"{distribution.n:,}", *bounds[:2], *percentiles, bounds[2]]))
        table = Table(numeric_columns("ms", "n", "mean", "min", *percentile_heads, "max"), rows)
        details.append(Details(format_load(level), [table, Facts(_level_facts(level))], is_open=len(levels) == 1))
    return Section("Each level in full", details) if details else Section()


def _level_facts(level: LevelResult) -> list[tuple[str, str]]:
    warmup_note = f", after {level.warmup_requests:,} warm-up requests kept apart" * bool(level.warmup_requests)
    steady = "no steady window"
    if level.steady is not None:
        steady = f"steady from {format_duration(level.steady.start_s)} to {format_duration(level.steady.end_s)}"
    peak_text = f"{level.peak_in_flight:,} counted here"
    if level.server_peak_in_flight is not None:
        peak_text += f", {level.server_peak_in_flight:,} reported by the server"
    facts = [
        ("Workload", (level.workload or "not named") + warmup_note),
        ("Duration", f"{format_duration(level.duration_s)}; {steady}"),
        *task_of(level).facts(level),
        ("Peak in flight", peak_text),
    ]
    if level.client is not None:
        busiest_note = f" in the busiest of {level.client.processes} processes" * (level.client.processes > 1)
        lag_note = f"event loop late by {format_number(level.client.loop_lag_p99_ms)} ms at p99"
        client_text = f"{format_percent(level.client.cpu_utilization)} of one core{busiest_note}, {lag_note}"
        is_client_measured = level.client.cpu_utilization is not None or level.client.loop_lag_p99_ms is not None
        facts.append(("Load generator", client_text if is_client_measured else "not measured: the level was too short"))
    if level.checks is not None:
        checks = level.checks
        token_counts = (
            f"{checks.counted_prompt_tokens:,} prompt (without the server's template), "
            f"{checks.counted_output_tokens:,} output; {'dis' * (not checks.counts_agree)}agrees with the server"
        )
        facts.append(("Spot checks", f"{checks.spot_checks_correct} of {checks.spot_checks} correct"))
        facts.append(("Tokens counted", token_counts))
    if level.slo:
        limits = ", ".join(f"{name} {format_number(limit)} ms" for name, limit in level.slo.items())
        facts.append(("Limits", f"{limits}; {format_number(level.goodput_per_s)} requests/s met them all"))
    return facts + [("Failed", f"{count:,} × {reason}") for reason, count in level.failures.items()]


def _answers_section(result: RunResult) -> Section:
    if result.evaluation is None:
        return Section()
    evaluation = result.evaluation
    line = (
        f"{evaluation.correct:,} of {evaluation.total:,} correct ({format_percent(evaluation.accuracy)}; 95 % Wilson "
        "interval "
        f"{format_percent(evaluation.ci_low)} to {format_percent(evaluation.ci_high)}), {evaluation.failed} requests "
        "failed."
    )
    columns = [Column(head, align="text") for head in ("Question", "Expected", "Actual")]
    rows = [Row([answer.question, answer.expected, answer.actual]) for answer in evaluation.incorrect]
    return Section("Answers", [Text(line), Table(columns, rows)])


def _settings_section(result: RunResult) -> Section:
    given = {name: value for name, value in result.settings.items() if value not in (None, {}, [], ())}
    facts = [(name, format_setting(value)) for name, value in given.items()]
    return Section("Settings", [Facts(facts)] if facts else [])


def _definition_facts(result: RunResult) -> list[tuple[str, str]]:
    if not all_levels(result):
        return []
    sample_counts = ", ".join(f"{count:,} for p{100 * QUANTILES[name]:g}" for name, count in SAMPLES_NEEDED.items())
    return [
        *((definition.name, definition.text) for definition in relevant_definitions(by_task(all_levels(result)))),
        (
            "n too small, n<",
            f"A percentile is stated only from enough samples (MLPerf early stopping, 99 % confidence): "
            f"{sample_counts}.",
        ),
        (
            "NO_TEXT",
            "The server counted tokens of answers in which no text came, as a model with random weights gives them; or "
            "a translation was empty.",
        ),
        (
            "CLIENT_BOUND",
            "The load generator was late or out of CPU, so the latencies are its own as much as the server's.",
        ),
    ]


def conversations_section(samples: Sequence[DemoSample]) -> Section:
    """Build a table of the chat messages and their answers."""
    rows = [Row([sample.given, sample.answer]) for sample in samples if sample.task is None]
    columns = [Column(head, align="text") for head in ("Question", "Answer")]
    return Section("Conversations", [Table(columns, rows)] if rows else [])


def samples_section(samples: Sequence[DemoSample]) -> Section:
    """Build a table of the translations, and a player with the transcript of each clip."""
    texts = [sample for sample in samples if sample.audio_wav is None and sample.task is not None]
    rows = [Row([sample.given, sample.answer, _result_cell(sample)]) for sample in texts]
    columns = [*(Column(head, align="text") for head in ("Sentence", "Translation")), Column("Right")]
    blocks: list[Block] = [Table(columns, rows)] if rows else []
    for sample in samples:
        if sample.audio_wav is not None:
            note = "" if _is_right(sample) else f"not right; expected: {sample.expected}"
            blocks.append(Audio(sample.given, sample.audio_wav, sample.answer, note))
    return Section("Translations and transcripts", blocks)


def _is_right(sample: DemoSample) -> bool:
    return sample.expected is None or sample.answer.strip() == sample.expected.strip()


def _result_cell(sample: DemoSample) -> Cell:
    return Cell("yes") if _is_right(sample) else Cell("no", "warning", title=f"expected: {sample.expected}")
