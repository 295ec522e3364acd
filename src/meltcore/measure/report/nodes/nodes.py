"""Builds the page of a command on all nodes of a cluster, for HTML and the console: nodes, rates and differences."""

from __future__ import annotations

from meltcore.measure.documents.values.formatting import format_duration, format_number, format_time
from meltcore.measure.documents.values.nodes import NodeMetric, NodeResult, NodesReport, NodeValue
from meltcore.measure.documents.verdicts import style_of
from meltcore.measure.report.page.page import (
    Block,
    Cell,
    Column,
    Details,
    Page,
    Row,
    Section,
    Table,
    numeric_columns,
    verdict_cell,
)

_RATE_NOTE = (
    "Each node's rate is that of its slowest part. The median is of the nodes with the same hardware. A node whose "
    "ratio to it is below the limit is SLOW; power-limited rates have a lower limit, as healthy GPUs differ in them."
)
_TIE_NOTE = "Most nodes with the same hardware have the other value; of two nodes that differ, the second is named."


def nodes_page(report: NodesReport) -> Page:
    """Return the page: failed nodes with their reasons, the slowest node of each rate, and the differences."""
    sections = [Section("Nodes", [_nodes(report)])]
    if report.metrics:
        sections.append(Section("Slowest node", [_slowest(report.metrics), *map(_all_nodes, report.metrics)]))
    if report.differences:
        columns = [Column(name, align="text") for name in ("node", "fact", "value", "most nodes")]
        rows = [Row([each.node, each.name, each.value, each.common]) for each in report.differences]
        sections.append(Section("What differs", [Table(columns, rows, _TIE_NOTE)]))
    return Page(
        title=f"meltcore {report.command} on {len(report.nodes)} nodes",
        name="Nodes of a cluster",
        subtitle=f"{format_time(report.started)} · {format_duration(report.duration_s)}",
        sections=sections,
        footer=f"meltcore {report.command} --ray · result schema {report.schema_version} · the same numbers stand in "
        "nodes.json, with the whole result of each node",
        badge=report.verdict,
        style=style_of(report.verdict),
        conclusion=_conclusion(report),
    )


def _conclusion(report: NodesReport) -> str:
    num_done = sum(node.status == "done" for node in report.nodes)
    parts = [f"{num_done} of {len(report.nodes)} nodes have a result"]
    if report.failed:
        parts.append("failed: " + ", ".join(f"{node.node} ({node.status})" for node in report.failed))
    if report.slow:
        parts.append("slow: " + ", ".join(report.slow))
    verdict_texts = [f"{node.node} ({node.verdict})" for node in report.nodes if node.status == "done"]
    if bad_verdicts := [each for each in verdict_texts if not each.endswith(("(OK)", "(PASS)"))]:
        parts.append("verdict: " + ", ".join(bad_verdicts))
    deviating_nodes = list(dict.fromkeys(each.node for each in report.differences))
    if deviating_nodes:
        parts.append("not like the others: " + ", ".join(deviating_nodes))
    elif not report.slow and not bad_verdicts and num_done > 1:
        parts.append("no node deviates")
    return "; ".join(parts)


def _nodes(report: NodesReport) -> Table:
    columns = [Column(name, align="text") for name in ("node", "hardware", "verdict", "reason")]
    rows = [Row([node.node, node.hardware or "–", _verdict_cell(node), node.reason]) for node in report.nodes]
    return Table(columns, rows, is_stacked=True)


def _verdict_cell(node: NodeResult) -> Cell:
    return Cell(node.verdict, "plain", tag=True) if node.status == "no GPU" else verdict_cell(node.verdict)


def _slowest(metrics: list[NodeMetric]) -> Table:
    columns = [
        *(Column(name, align="text") for name in ("rate", "slowest node")),
        *numeric_columns("value", "median", "ratio", "limit"),
        Column("unit", align="left"),
        Column("verdict", align="left"),
    ]
    rows = []
    for metric in metrics:
        value = metric.values[0]
        name = f"{value.node} {value.subject}".strip()
        rows.append(Row([metric.key, name, *_numbers(value, metric), metric.unit, _speed_cell(value)]))
    return Table(columns, rows, _RATE_NOTE)


def _all_nodes(metric: NodeMetric) -> Block:
    columns = [
        Column("node", align="text"),
        *numeric_columns(metric.unit, "median", "ratio", "limit"),
        Column("verdict", align="left"),
    ]
    rows = [
        Row([f"{value.node} {value.subject}".strip(), *_numbers(value, metric), _speed_cell(value)])
        for value in metric.values
    ]
    summary = f"{metric.key}: all nodes with {metric.hardware}"
    return Details(summary, [Table(columns, rows)], is_open=any(value.is_slow for value in metric.values))


def _numbers(value: NodeValue, metric: NodeMetric) -> list[str]:
    return [format_number(value.value), format_number(metric.median), f"{value.ratio:.3f}", f"{metric.slow_below:.2f}"]


def _speed_cell(value: NodeValue) -> Cell:
    return verdict_cell("SLOW" if value.is_slow else "OK")
