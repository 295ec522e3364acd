"""Defines the result of one command on all nodes of a cluster, and compares the nodes with each other.

Nodes are compared with nodes that have the same GPUs. Nodes without GPUs are compared by their CPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Literal

import msgspec

from meltcore.measure.documents.node import Certificate, Snapshot
from meltcore.measure.documents.schema import Fingerprint, VersionedDocument
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.values.formatting import format_counts
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict
from meltcore.protocol.cluster import CommandEnded

NODES_FILE = "nodes.json"
_RATE = "/s"  # in the unit of what is better when it is higher
_DOUBTFUL_VERDICTS = ("WARN", "UNKNOWN", "DEGRADED")  # verdicts of a node

NodeDocument = Snapshot | Certificate | ScoredRun


class NodeResult(msgspec.Struct, kw_only=True):
    """The result of one node. `verdict` is the verdict of its document, or the status of a node without a document.

    Nodes with the same `hardware` are compared. `reason` says why there is no document, or why the document cannot be
    trusted.
    """

    node: str
    status: Literal["done", "failed", "late", "no GPU"]
    verdict: str
    hardware: str = ""
    reason: str = ""
    returncode: int | None = None
    duration_s: float = 0.0
    document: NodeDocument | None = None


class NodeValue(msgspec.Struct, kw_only=True):
    """A value of one node. `subject` is the measured part of the node.

    `ratio` is the value divided by the median of the nodes.
    """

    node: str
    value: float
    ratio: float
    is_slow: bool
    subject: str = ""


class NodeMetric(msgspec.Struct, kw_only=True):
    """A rate of all nodes with the same hardware, the slowest node first.

    A node's value is the value of its slowest part. A node whose ratio to the median is below `slow_below` is slow.
    """

    key: str
    unit: str
    hardware: str
    median: float
    slow_below: float
    values: list[NodeValue]


class NodeDifference(msgspec.Struct, kw_only=True):
    """A fact of a node whose value differs from the value `common` of most nodes.

    The fact may be the hardware itself.
    """

    node: str
    name: str
    value: str
    common: str


class NodesReport(VersionedDocument, kw_only=True, tag_field="document", tag="nodes"):
    """The result of a command on all nodes of a cluster. `started` is UTC in ISO 8601.

    The verdict is PASS if nodes with the same hardware are alike, WARN if a node deviates, and FAIL if a node failed.
    """

    command: str
    started: str
    duration_s: float
    verdict: CheckVerdict
    nodes: list[NodeResult]
    metrics: list[NodeMetric] = msgspec.field(default_factory=list)
    differences: list[NodeDifference] = msgspec.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 if all nodes are alike, 1 if a node deviates, and 2 if a node has failed."""
        return MEANINGS[self.verdict].exit_code

    @property
    def failed(self) -> list[NodeResult]:
        """The nodes without a result."""
        return [node for node in self.nodes if node.status in ("failed", "late")]

    @property
    def slow(self) -> list[str]:
        """The names of nodes that are slow in a metric, each once, the slowest first."""
        values = [value for metric in self.metrics for value in metric.values if value.is_slow]
        return list(dict.fromkeys(value.node for value in sorted(values, key=lambda value: value.ratio)))


def make_report(
    command: str,
    ended_commands: Sequence[CommandEnded],
    facts: Callable[[Snapshot], Mapping[str, str]],
    slow_below: Callable[[str], float],
    *,
    started: str,
    duration_s: float,
) -> NodesReport:
    """Return the report of all nodes.

    `facts` returns the compared facts of a snapshot by name. `slow_below` returns, for a metric's key, the ratio to the
    median below which a node is slow.
    """
    nodes = [_node_result(each) for each in ended_commands]
    metrics = _metrics(nodes, slow_below)
    snapshots = [(node, _snapshot(node.document)) for node in nodes]
    differences = [
        *_gpu_differences(nodes),
        *_differences([(node, facts(snapshot)) for node, snapshot in snapshots if snapshot is not None]),
    ]
    report = NodesReport(
        command=command,
        started=started,
        duration_s=duration_s,
        verdict="PASS",
        nodes=nodes,
        metrics=metrics,
        differences=differences,
    )
    if report.failed or any(node.verdict == "FAIL" for node in nodes):
        report.verdict = "FAIL"
    elif differences or report.slow or any(node.verdict in _DOUBTFUL_VERDICTS for node in nodes):
        report.verdict = "WARN"
    return report


# --- one node --------------------------------------------------------------------------------------------------------


def _node_result(command: CommandEnded) -> NodeResult:
    if command.status != "ended":
        return NodeResult(
            node=command.node, status=command.status, verdict=command.status.upper(), reason=command.reason
        )
    result = NodeResult(
        node=command.node,
        status="failed",
        verdict="FAILED",
        reason=command.reason,
        returncode=command.returncode,
        duration_s=command.duration_s,
    )
    try:
        document = msgspec.json.decode(command.output, type=NodeDocument)
    except msgspec.MsgspecError as error:
        result.reason = command.reason or f"exit status {command.returncode}, without a result: {error}"
        return result
    result.document, result.hardware = document, _hardware(document)
    if isinstance(document, Snapshot) and command.has_gpu and not document.gpus:
        result.reason = "; ".join(["it has NVIDIA GPUs, and its driver shows none", *document.notes])
    elif isinstance(document, ScoredRun) and document.verdict != "OK":
        result.verdict = document.verdict
        result.reason = "; ".join(document.reasons) or command.reason
    else:
        result.status, result.verdict, result.reason = "done", _verdict(document), _findings(document)
    return result


def _verdict(document: NodeDocument) -> str:
    if isinstance(document, Certificate):
        return document.verdict
    return "DEGRADED" if isinstance(document, ScoredRun) and document.score.health == "DEGRADED" else "OK"


def _findings(document: NodeDocument) -> str:
    if isinstance(document, ScoredRun):
        return "; ".join(
            reason for device in document.score.devices if device.health is not None for reason in device.health.reasons
        )
    findings = document.findings if isinstance(document, Certificate) else []
    return "; ".join(f"{each.code} {each.subject}: {each.message}" for each in findings)


def _hardware(document: NodeDocument) -> str:
    """Return the GPUs of a document, or its CPU if there are no GPUs."""
    if isinstance(document, ScoredRun):
        return format_counts([device.name for device in document.score.devices])
    snapshot = _snapshot(document)
    assert snapshot is not None  # the others have one
    return format_counts([gpu.name for gpu in snapshot.gpus]) or _cpu(snapshot.fingerprint)


def _snapshot(document: NodeDocument | None) -> Snapshot | None:
    """Return the node's snapshot from a document. Returns None for a score, which has no snapshot."""
    if isinstance(document, Certificate):
        return document.snapshot
    return document if isinstance(document, Snapshot) else None


def _cpu(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.cpu}, {fingerprint.cores} cores"


# --- rates -----------------------------------------------------------------------------------------------------------


def _metrics(nodes: Sequence[NodeResult], slow_below: Callable[[str], float]) -> list[NodeMetric]:
    """Return every rate that was measured on at least two nodes with the same hardware."""
    by_metric: dict[tuple[str, str, str], list[tuple[str, float, str]]] = {}
    for node in nodes:
        slowest: dict[tuple[str, str], tuple[float, str]] = {}
        for key, unit, value, subject in _rates(node.document):
            slowest[key, unit] = min(slowest.get((key, unit), (value, subject)), (value, subject))
        for (key, unit), (value, subject) in slowest.items():
            by_metric.setdefault((node.hardware, key, unit), []).append((node.node, value, subject))
    metrics = []
    for (hardware, key, unit), values in by_metric.items():
        median_value = median(value for _, value, _ in values)
        if len(values) > 1 and median_value > 0:
            limit = slow_below(key)
            node_values = [
                NodeValue(
                    node=node,
                    value=value,
                    ratio=value / median_value,
                    is_slow=value < limit * median_value,
                    subject=subject,
                )
                for node, value, subject in sorted(values, key=lambda each: each[1])
            ]
            metrics.append(
                NodeMetric(
                    key=key, unit=unit, hardware=hardware, median=median_value, slow_below=limit, values=node_values
                )
            )
    return metrics


def _rates(document: NodeDocument | None) -> Iterator[tuple[str, str, float, str]]:
    """Return (key, unit, value, subject) of each rate that was measured."""
    if isinstance(document, Certificate):
        for row in (row for check in document.checks for row in check.rows):
            if row.measured is not None and _RATE in row.unit and row.verdict != "INVALID":
                yield row.key, row.unit, row.measured, row.subject
    elif isinstance(document, ScoredRun):
        score = document.score
        if score.output_tokens_per_s is not None:
            yield "score", "tok/s", score.output_tokens_per_s, ""
        for device in score.devices:
            if len(score.devices) > 1 and device.output_tokens_per_s is not None:
                yield "slowest GPU", "tok/s", device.output_tokens_per_s, device.label


# --- facts -----------------------------------------------------------------------------------------------------------


def _gpu_differences(nodes: Sequence[NodeResult]) -> list[NodeDifference]:
    """Return the differences between the GPUs of the nodes. A node that has lost a GPU differs from the other nodes."""
    with_gpus = [(node, {"GPUs": node.hardware}) for node in nodes if _has_gpus(node.document)]
    return _compare(with_gpus)


def _has_gpus(document: NodeDocument | None) -> bool:
    if isinstance(document, ScoredRun):
        return any(device.uuid for device in document.score.devices)
    snapshot = _snapshot(document)
    return snapshot is not None and bool(snapshot.gpus)


def _differences(facts: Sequence[tuple[NodeResult, Mapping[str, str]]]) -> list[NodeDifference]:
    by_hardware: dict[str, list[tuple[NodeResult, Mapping[str, str]]]] = {}
    for node, node_facts in facts:
        by_hardware.setdefault(node.hardware, []).append((node, node_facts))
    return [difference for group in by_hardware.values() for difference in _compare(group)]


def _compare(facts: Sequence[tuple[NodeResult, Mapping[str, str]]]) -> list[NodeDifference]:
    """Return each fact of a node that differs from the value of most nodes.

    If there are only two nodes, the difference belongs to the second node.
    """
    names = dict.fromkeys(name for _, node_facts in facts for name in node_facts)
    differences = []
    for name in names:
        values = [(node.node, node_facts.get(name, "absent")) for node, node_facts in facts]
        [(common, _)] = Counter(value for _, value in values).most_common(1)
        differences += [
            NodeDifference(node=node, name=name, value=value, common=common)
            for node, value in values
            if value != common
        ]
    return differences
