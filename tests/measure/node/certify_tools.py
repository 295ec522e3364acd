"""A scripted eight-GPU H200 node with healthy metrics, and ways to modify one of them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fake_gpu import FakeGpu
from fake_node import FakeNode, healthy_result

from meltcore.common.process import CompletedRun
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.node import Certificate, Tier
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import Evaluation, RunResult
from meltcore.measure.node.certify.checks.run import certify
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult

ModifyResult = Callable[[ProbeRequest, tuple[int, ...], ProbeResult], ProbeResult | None]


def unmodified(request: ProbeRequest, gpus: tuple[int, ...], result: ProbeResult) -> ProbeResult | None:
    return result


def h200s(count: int = 8, **others: Any) -> list[FakeGpu]:
    return [FakeGpu(uuid=f"GPU-{index:08d}-fake", bus_id=f"0000:{index:02x}:00.0", **others) for index in range(count)]


def node_of(gpus: Sequence[FakeGpu], modify: ModifyResult = unmodified, **others: Any) -> FakeNode:
    def measure(request: ProbeRequest, target: tuple[int, ...]) -> ProbeResult | None:
        return modify(request, target, healthy_result(request, target))

    others.setdefault("program", correct_answers)
    return FakeNode(fakes=list(gpus), measure=measure, **others)


def correct_answers(command: Sequence[str], environment: Mapping[str, str]) -> CompletedRun:
    """Writes what `meltcore demo` writes after a run that passed."""
    return demo_run(command, code=0, share=0.99)


def demo_run(command: Sequence[str], code: int, share: float, reasons: Sequence[str] = ()) -> CompletedRun:
    folder = RunFolder.create(Path(command[command.index("--out") + 1]), "demo")
    result = RunResult(
        command="demo",
        status="complete",
        started="2026-11-21T00:00:00+00:00",
        duration_s=40.0,
        fingerprint=take_fingerprint(),
        evaluation=Evaluation(total=200, correct=round(200 * share), failed=0, ci_low=share, ci_high=share),
        reasons=list(reasons),
    )
    folder.write_result(result)
    return CompletedRun(code, b"", b"")


def certified(
    folder: Path, node: FakeNode, tier: Tier = "standard", requested: str | None = None, **others: Any
) -> Certificate:
    return certify(node, node.gpus(requested), tier, folder, **others)


def findings_in(certificate: Certificate) -> list[tuple[str, str, str]]:
    """(verdict, code, subject) of each finding."""
    return [(finding.verdict, finding.code, finding.subject) for finding in certificate.findings]
