"""The report on all nodes of a cluster, without Ray: nodes of one kind are compared, and failures are named."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console

from meltcore.hardware.snapshot import shared_facts
from meltcore.protocol.cluster import CommandEnded
from meltcore.report.console import print_page
from meltcore.report.html import render_html
from meltcore.report.nodes import nodes_page
from meltcore.results.nodes import NodesReport, make_report
from meltcore.results.schema import Fingerprint
from meltcore.results.snapshot import GpuSnapshot, Snapshot

GIB = 2**30


def snapshot(*power_w: float, driver: str = "580.1", memory: int = 64 * GIB, gpu: str = "H200") -> Snapshot:
    """A node with a GPU per power limit; ids and readings differ from node to node."""
    gpus = [
        GpuSnapshot(
            index=index,
            name=gpu,
            uuid=f"GPU-{memory}-{index}",
            facts={"power_limit_w": limit, "bus_id": str(memory), "temperature_c": memory % 40, "ecc_corrected": 3},
        )
        for index, limit in enumerate(power_w)
    ]
    fingerprint = Fingerprint(cpu="Xeon", cores=8, memory_bytes=memory, kernel="6.1", python="3.12", taken="")
    topology = [["X"] * len(gpus)] * len(gpus)
    return Snapshot(fingerprint=fingerprint, driver=driver, gpus=gpus, topology=topology)


def ended(node: str, document: msgspec.Struct, returncode: int = 0, *, has_gpu: bool = True) -> CommandEnded:
    return CommandEnded(node, "ended", "", returncode, msgspec.json.encode(document), has_gpu=has_gpu)


def report_on(*nodes: CommandEnded, command: str = "snapshot") -> NodesReport:
    return make_report(command, nodes, shared_facts, started="2026-11-24T00:00:00+00:00", duration_s=1.0)


def printed(report: NodesReport) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        print_page(nodes_page(report), console)
    assert report.nodes[0].node in render_html(nodes_page(report))
    return " ".join(capture.get().split())


def test_nodes_of_one_kind_are_alike_whatever_their_ids_and_readings() -> None:
    nodes = [ended(name, snapshot(700.0, memory=64 * GIB + extra)) for extra, name in enumerate("abc")]
    report = report_on(*nodes)
    assert (report.verdict, report.differences) == ("ALIKE", [])
    assert printed(report).endswith("ALIKE 3 of 3 nodes have a result; no node deviates")
    assert msgspec.json.decode(msgspec.json.encode(report), type=NodesReport) == report


def test_each_fact_that_most_nodes_have_otherwise_is_named() -> None:
    nodes = [
        ended("a", snapshot(650.0, 700.0)),
        ended("b", snapshot(700.0, 700.0)),
        ended("c", snapshot(700.0, 700.0, driver="570.9")),
    ]
    report = report_on(*nodes)
    found = [(each.node, each.name, each.value, each.common) for each in report.differences]
    assert found == [("c", "driver", "570.9", "580.1"), ("a", "GPU 0 power limit", "650.0", "700.0")]
    assert report.verdict == "DEVIATES"
    assert "not like the others: c, a" in printed(report)


def test_node_that_lost_a_gpu_is_named_and_one_without_gpus_is_another_kind() -> None:
    nodes = [
        *(ended(name, snapshot(700.0, 700.0)) for name in "ab"),
        ended("c", snapshot(700.0)),
        ended("head", snapshot(driver="UNKNOWN"), has_gpu=False),
    ]
    report = report_on(*nodes)
    assert [(each.node, each.name, each.value) for each in report.differences] == [("c", "GPUs", "H200")]
    assert report.nodes[3].verdict == "OK"


def test_node_with_boards_that_its_driver_does_not_show_has_failed() -> None:
    report = report_on(ended("a", snapshot(), has_gpu=True), ended("b", snapshot(), has_gpu=False))
    assert [node.status for node in report.nodes] == ["failed", "done"]
    assert "its driver shows none" in report.nodes[0].reason


@pytest.mark.parametrize(
    ("node", "text"),
    [
        (CommandEnded("b", "late", "it did not end within 5 s"), "b LATE it did not end within 5 s"),
        (CommandEnded("b", "failed", "the node is gone"), "b FAILED the node is gone"),
        (CommandEnded("b", "ended", "boom", 1, b"not json"), "b FAILED boom"),
        (CommandEnded("b", "ended", "", -9), "b FAILED exit status -9, without a result"),
    ],
)
def test_node_without_a_result_is_named_with_its_reason_beside_the_others(node: CommandEnded, text: str) -> None:
    report = report_on(ended("a", snapshot(700.0)), node)
    shown = printed(report).replace(" – ", " ")
    assert text in shown
    assert report.verdict == "FAILED"
    assert report.nodes[0].status == "done"
    assert "1 of 2 nodes have a result; failed: b" in shown
