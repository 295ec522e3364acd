"""Formats a comparison of server starts: as a page, as lines on the console, and as text for a pull request."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from difflib import SequenceMatcher

from markupsafe import Markup

from meltcore.measure.documents.comparison import COMPARISON_FILE, ComparedMetric, ComparisonResult
from meltcore.measure.documents.values.formatting import (
    NOT_MEASURED,
    format_change,
    format_load_settings,
    format_number,
    format_percent,
)
from meltcore.measure.documents.verdicts import style_of
from meltcore.measure.report.load.run import machine_section
from meltcore.measure.report.page.charts import dot_rows
from meltcore.measure.report.page.page import (
    Box,
    Cell,
    Column,
    Facts,
    Figure,
    Page,
    Row,
    Section,
    Table,
    Text,
    numeric_columns,
)

_MAX_ARGS_CHARS = 20  # of the changed arguments beside the name of a side; what is longer is in the commands
_HEADERS = ("load", "metric", "old", "new", "change", "95 % interval", "p", "n")


def comparison_page(comparison: ComparisonResult) -> Page:
    """Build the page: warnings and the result, then the commands, every start, and all metrics."""
    primary, limits = comparison.primary, comparison.limits
    style = style_of(comparison.verdict)
    differences = [f"{difference.name}: {difference.old} → {difference.new}" for difference in comparison.differences]
    warnings = [
        Box("bad", "These sets do not compare", items=comparison.doubts),
        Box("unsure", "Different on the two sides", items=differences),
    ]
    commands = [
        (f"old: {comparison.old_name}", comparison.old_command),
        (f"new: {comparison.new_name}", comparison.new_command),
    ]
    load = format_load_settings(comparison.load)
    facts = [
        *([("Load", load)] if load else []),
        ("Least effect", f"{format_percent(limits.least_effect)}: smaller changes get no verdict"),
        ("Must find", f"{format_percent(limits.must_find)}: NO EVIDENCE rules out changes of this size"),
        ("Significance", f"Mann-Whitney p below {limits.alpha}, and the bootstrap interval without zero"),
    ]
    rows = [
        Row(
            [Cell(row.load, console_text=row.load.removeprefix("concurrency ")), row.metric, *_metric_cells(row)],
            _is_primary(comparison, row),
            next_row is None or next_row.load != row.load,
        )
        for row, next_row in zip(comparison.rows, [*comparison.rows[1:], None], strict=True)
    ]
    columns = [
        Column("Load", console="conn."),
        Column("Metric", align="left"),
        *numeric_columns(*_HEADERS[2:]),
    ]
    note = "The shaded row gives the verdict; the others are shown and not judged."
    caption = f"a dot is one fresh start, the bar their mean; {primary.better} is better"
    result = Box(style, lead=f"{primary.name}: {format_change(primary.change)}.", text=comparison.reason, console=False)
    chart = Figure(primary.name, starts_chart(comparison), caption=caption)
    sections = [
        Section(blocks=[*(box for box in warnings if box.items), result]),
        Section(
            "What was compared",
            [Facts([(name, command or "no command kept") for name, command in commands], console=True)],
        ),
        Section("Each start", [chart, Text(starts_line(comparison), "small")]),
        Section("All metrics", [Table(columns, rows, is_compact=True), Text(note, "small", console=False)]),
        Section(
            column_sections=[
                Section("Read with care", [Box(items=comparison.cautions)]),
                Section("Rules", [Facts(facts)]),
            ]
        ),
        machine_section(comparison.fingerprint),
    ]
    return Page(
        title=f"meltcore compare – {comparison.verdict}",
        name="compare",
        subtitle=f"{comparison.old_name} against {comparison.new_name} · {primary.name}",
        badge=comparison.verdict,
        style=style,
        sections=[section for section in sections if section.blocks or section.column_sections],
        footer=f"meltcore compare · the same numbers stand in {COMPARISON_FILE}",
        conclusion=comparison_headline(comparison),
    )


def comparison_markdown(comparison: ComparisonResult) -> str:
    """Format a comparison as Markdown for a pull request. Metrics other than the primary metric are folded."""
    other_rows = [row for row in comparison.rows if not _is_primary(comparison, row)]
    differences = [
        f"- different: {_escape_markdown(difference.name)}: {_escape_markdown(difference.old)} → "
        f"{_escape_markdown(difference.new)}"
        for difference in comparison.differences
    ]
    reasons = [f"- **does not compare**: {reason}" for reason in comparison.doubts]
    lines = [
        f"### {comparison.verdict}: {comparison_headline(comparison)}",
        "",
        *([*reasons, *differences, ""] if reasons or differences else []),
        *_markdown_table([comparison.primary]),
        "",
    ]
    if other_rows:
        lines += ["<details><summary>Other metrics, shown and not judged</summary>", ""]
        lines += [*_markdown_table(other_rows), "", "</details>", ""]
    lines += [
        f"old: {comparison.old_name} `{comparison.old_command}`  ",
        f"new: {comparison.new_name} `{comparison.new_command}`",
        "",
    ]
    return "\n".join([*lines, starts_line(comparison), "", *(f"- {caution}" for caution in comparison.cautions)]) + "\n"


def comparison_headline(comparison: ComparisonResult) -> str:
    """Return the primary metric on both sides, its change, and the reason for the verdict, as one line."""
    row = comparison.primary
    values = f"{format_number(row.old)} -> {format_number(row.new)} ({format_change(row.change)})"
    return f"{row.name}: {values}. {comparison.reason}"


def changed_arguments(old_command: str, new_command: str) -> tuple[list[str], list[str]]:
    """Return two lists: arguments that only the old command has, and arguments that only the new command has."""
    old_args, new_args = shlex.split(old_command), shlex.split(new_command)
    removed: list[str] = []
    added: list[str] = []
    for tag, old_start, old_end, new_start, new_end in SequenceMatcher(
        None, old_args, new_args, autojunk=False
    ).get_opcodes():
        if tag != "equal":
            removed += old_args[old_start:old_end]
            added += new_args[new_start:new_end]
    return removed, added


def side_names(comparison: ComparisonResult) -> tuple[str, str]:
    """Return the names of both sides, each with the arguments that only its command has, if they are short."""
    removed, added = changed_arguments(comparison.old_command, comparison.new_command)
    return _side_name(comparison.old_name, removed), _side_name(comparison.new_name, added)


def _side_name(name: str, args: Sequence[str]) -> str:
    text = shlex.join(args)
    return f"{name}: {text}" if text and len(text) <= _MAX_ARGS_CHARS else name


def starts_line(comparison: ComparisonResult) -> str:
    """Return the number and order of the starts, the control result, and the noise of the old server, as one line."""
    num_starts = f"{len(comparison.primary.old_values)} and {len(comparison.primary.new_values)} fresh starts"
    design_text = (
        f"{num_starts}, in the order {comparison.order}" if comparison.order else f"{num_starts}, not interleaved"
    )
    if comparison.control is not None:
        design_text += f"; A against A: {format_change(comparison.control.change)}"
    noise = NOT_MEASURED if comparison.noise is None else f"{100 * comparison.noise:.1f} %"
    return f"{design_text}; A's own noise: {noise}."


def starts_chart(comparison: ComparisonResult) -> Markup:
    """Draw a row of dots per set of starts, one dot per start."""
    old_name, new_name = side_names(comparison)
    rows = [(old_name, 1, comparison.primary.old_values), (new_name, 2, comparison.primary.new_values)]
    if comparison.control is not None:
        rows.insert(0, (f"{comparison.old_name} before", 4, comparison.control.old_values))
    return dot_rows(rows, f"{comparison.primary.name}: every start")


def _metric_cells(row: ComparedMetric) -> list[str]:
    """Return the cells of a metric's row: old, new, change, interval, p, n."""
    format_value = format_percent if row.metric == "accuracy" else format_number
    interval = (
        NOT_MEASURED
        if row.low is None or row.high is None
        else f"{format_change(row.low)} to {format_change(row.high)}"
    )
    p = NOT_MEASURED if row.p is None else f"{row.p:.3f}" if row.p >= 0.001 else "<0.001"
    num_starts = f"{len(row.old_values)}, {len(row.new_values)}"
    return [format_value(row.old), format_value(row.new), format_change(row.change), interval, p, num_starts]


def _is_primary(comparison: ComparisonResult, row: ComparedMetric) -> bool:
    return (row.load, row.metric) == (comparison.primary.load, comparison.primary.metric)


def _markdown_table(rows: Sequence[ComparedMetric]) -> list[str]:
    lines = [f"| {' | '.join(_HEADERS)} |", f"|{'---|' * 2}{'---:|' * (len(_HEADERS) - 2)}"]
    return lines + [f"| {' | '.join([row.load, row.metric, *_metric_cells(row)])} |" for row in rows]


def _escape_markdown(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
