"""The report on all nodes of a cluster, without Ray: nodes of one kind are compared, and failures are named."""

from __future__ import annotations

import msgspec
import pytest
from rich.console import Console
from sample_scores import sample_device, sample_scored_run

from meltcore.cli.all_nodes import certificate_status
from meltcore.measure.documents.node import Certificate, CertificateRow, CheckReport, GpuSnapshot, Snapshot
from meltcore.measure.documents.schema import Fingerprint
from meltcore.measure.documents.values.nodes import NodesReport, make_report
from meltcore.measure.documents.verdicts import CheckVerdict
from meltcore.measure.node.certify.judge import straggler_fraction
from meltcore.measure.node.snapshot import shared_facts
from meltcore.measure.report.nodes.nodes import nodes_page
from meltcore.measure.report.page.console import print_page
from meltcore.measure.report.page.html import render_html
from meltcore.protocol.cluster import CommandEnded

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
    return make_report(
        command, nodes, shared_facts, straggler_fraction, started="2026-11-24T00:00:00+00:00", duration_s=1.0
    )


def printed(report: NodesReport) -> str:
    console = Console(width=200, force_terminal=False)
    with console.capture() as capture:
        print_page(nodes_page(report), console)
    assert report.nodes[0].node in render_html(nodes_page(report))
    return " ".join(capture.get().split())


def test_nodes_of_one_kind_are_alike_whatever_their_ids_and_readings() -> None:
    nodes = [ended(name, snapshot(700.0, memory=64 * GIB + extra)) for extra, name in enumerate("abc")]
    report = report_on(*nodes)
    assert (report.verdict, report.differences) == ("PASS", [])
    assert printed(report).endswith("PASS 3 of 3 nodes have a result; no node deviates")
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
    assert report.verdict == "WARN"
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
    assert report.verdict == "FAIL"
    assert report.nodes[0].status == "done"
    assert "1 of 2 nodes have a result; failed: b" in shown


def certificate(copy: float, gemm: float, verdict: CheckVerdict = "PASS") -> Certificate:
    """Of two GPUs, of which the second has these rates, and the first is faster."""
    rates = [("memory/copy", "GB/s bus", copy), ("gemm/bf16/8192x8192x8192", "TFLOP/s", gemm), ("bits", "% correct", 1)]
    rows = [
        CertificateRow(
            key=key, subject=f"GPU {gpu}", gpus=[gpu], unit=unit, verdict="PASS", measured=value + 10 - 10 * gpu
        )
        for key, unit, value in rates
        for gpu in (0, 1)
    ]
    return Certificate(
        tier="quick",
        verdict=verdict,
        required=["memory"],
        started="2026-11-24T00:00:00+00:00",
        duration_s=1.0,
        snapshot=snapshot(700.0, 700.0),
        checks=[CheckReport(name="memory", title="Memory", verdict="PASS", rows=rows)],
    )


def test_slowest_part_of_the_slowest_node_is_beside_the_median() -> None:
    """A power-limited rate may be 20 % lower, others 7 %."""
    documents = {"a": certificate(4000, 600), "b": certificate(3700, 700), "c": certificate(4040, 710)}
    report = report_on(*(ended(name, each) for name, each in documents.items()), command="certify")
    copy, gemm = report.metrics
    assert [(each.node, each.value, each.subject, each.is_slow) for each in copy.values] == [
        ("b", 3700, "GPU 1", True),
        ("a", 4000, "GPU 1", False),
        ("c", 4040, "GPU 1", False),
    ]
    assert (copy.median, copy.values[0].ratio) == (4000, 0.925)
    assert (gemm.values[0].node, gemm.values[0].ratio, gemm.values[0].is_slow) == ("a", 600 / 700, False)
    assert (report.slow, certificate_status(report)) == (["b"], 1)
    assert "memory/copy b GPU 1 3,700 4,000 0.925 0.93 GB/s bus SLOW" in printed(report)


def test_nodes_of_certificates_are_compared_by_their_facts_too() -> None:
    other = certificate(4000, 700)
    other.snapshot.driver = "570.9"
    documents = {"a": certificate(4000, 700), "b": other, "c": certificate(4000, 700)}
    report = report_on(*(ended(name, each) for name, each in documents.items()), command="certify")
    assert [(each.node, each.name, each.value) for each in report.differences] == [("b", "driver", "570.9")]
    assert (report.verdict, certificate_status(report)) == ("WARN", 1)


def test_rates_of_other_gpus_and_of_busy_ones_do_not_count() -> None:
    slower, busy = certificate(2000, 300), certificate(1000, 700)
    for gpu in slower.snapshot.gpus:
        gpu.name = "A100"
    for row in busy.checks[0].rows[:2]:
        row.verdict = "INVALID"
    documents = {"a": certificate(4000, 700), "b": certificate(4000, 700), "c": slower, "d": busy}
    report = report_on(*(ended(name, each) for name, each in documents.items()), command="certify")
    assert {metric.key: [each.node for each in metric.values] for metric in report.metrics} == {
        "memory/copy": ["a", "b"],
        "gemm/bf16/8192x8192x8192": ["a", "b", "d"],
    }
    assert report.slow == []


@pytest.mark.parametrize(
    ("nodes", "status"),
    [
        ([ended("b", certificate(4000, 700))], 0),
        ([ended("b", certificate(4000, 700, "WARN"), 1)], 1),
        ([ended("b", certificate(4000, 700, "UNKNOWN"), 3)], 3),
        ([ended("b", certificate(4000, 700, "FAIL"), 2)], 2),
        ([CommandEnded("b", "late", "it did not end")], 3),
        ([CommandEnded("b", "ended", "meltcore certify: FAIL: GPU 1 is lost", 2)], 2),
        ([CommandEnded("b", "late"), ended("c", certificate(4000, 700, "FAIL"), 2)], 2),
        ([CommandEnded("b", "no GPU", "no NVIDIA GPU")], 0),
    ],
)
def test_certificates_have_the_status_of_the_worst_node(nodes: list[CommandEnded], status: int) -> None:
    report = report_on(ended("a", certificate(4000, 700)), *nodes, command="certify")
    assert certificate_status(report) == status
    assert (report.verdict == "PASS") == (status == 0)
    printed(report)


def test_scores_are_compared_by_node_and_by_slowest_gpu() -> None:
    runs = {
        name: sample_scored_run([sample_device(), sample_device(peak, "GPU 1")])
        for name, peak in (("a", 32_000.0), ("b", 32_000.0), ("c", 26_000.0))
    }
    report = report_on(*(ended(name, run) for name, run in runs.items()), command="bench")
    score, slowest = report.metrics
    assert (score.values[0].node, slowest.values[0].node, slowest.values[0].subject) == ("c", "c", "GPU 1")
    assert (score.values[0].is_slow, slowest.values[0].is_slow) == (True, True)
    assert report.exit_code == 1

    runs["b"].verdict, runs["b"].reasons = "FAILED", ["the engine ended"]
    report = report_on(*(ended(name, run, 1) for name, run in runs.items()), command="bench")
    assert (report.nodes[1].status, report.nodes[1].reason, report.exit_code) == ("failed", "the engine ended", 2)
