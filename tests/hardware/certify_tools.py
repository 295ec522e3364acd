"""A scripted eight-GPU H200 node whose every figure is healthy, and ways to spoil one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meltcore.hardware.certify import certify
from meltcore.hardware.fake import FakeGpu
from meltcore.hardware.fake_node import FakeNode, healthy_answer
from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.node import Ran
from meltcore.results.certificate import Certificate, Tier
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.runfolder import RunFolder
from meltcore.results.schema import Evaluation, RunResult

Spoil = Callable[[Question, tuple[int, ...], Answer], Answer | None]


def untouched(question: Question, gpus: tuple[int, ...], answer: Answer) -> Answer | None:
    return answer


def h200s(count: int = 8, **others: Any) -> list[FakeGpu]:
    return [FakeGpu(uuid=f"GPU-{index:08d}-fake", bus_id=f"0000:{index:02x}:00.0", **others) for index in range(count)]


def node_of(gpus: Sequence[FakeGpu], spoil: Spoil = untouched, **others: Any) -> FakeNode:
    def measured(question: Question, target: tuple[int, ...]) -> Answer | None:
        return spoil(question, target, healthy_answer(question, target))

    others.setdefault("program", right_answers)
    return FakeNode(fakes=list(gpus), measured=measured, **others)


def right_answers(command: Sequence[str], environment: Mapping[str, str]) -> Ran:
    """`meltcore demo` as it leaves things after a good run."""
    return demo_run(command, code=0, share=0.99)


def demo_run(command: Sequence[str], code: int, share: float, reasons: Sequence[str] = ()) -> Ran:
    folder = RunFolder.create(Path(command[command.index("--out") + 1]), "demo")
    result = RunResult(
        command="demo",
        status="complete",
        started="2026-11-21T00:00:00+00:00",
        duration_s=40.0,
        fingerprint=take_fingerprint(),
        evaluation=Evaluation(asked=200, right=round(200 * share), failed=0, low=share, high=share),
        reasons=list(reasons),
    )
    folder.write_result(result)
    return Ran(code, b"", b"")


def certified(
    folder: Path, node: FakeNode, tier: Tier = "standard", wanted: str | None = None, **others: Any
) -> Certificate:
    return certify(node, node.gpus(wanted), tier, folder, **others)


def told(certificate: Certificate) -> list[tuple[str, str, str]]:
    """(verdict, code, subject) of each finding."""
    return [(finding.verdict, finding.code, finding.subject) for finding in certificate.findings]
