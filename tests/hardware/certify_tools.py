"""A scripted eight-GPU H200 node whose every figure is healthy, and ways to spoil one."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from meltcore.hardware.certify import certify
from meltcore.hardware.fake import FakeGpu
from meltcore.hardware.fake_node import FakeNode
from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.node import Ran
from meltcore.results.certificate import Certificate, Tier
from meltcore.results.fingerprint import take_fingerprint
from meltcore.results.runfolder import RunFolder
from meltcore.results.schema import Evaluation, RunResult

# What H200 SXM GPUs gave (priors.py), by the beginning of a key; the first that fits counts.
HEALTHY_FIGURES: tuple[tuple[str, float], ...] = (
    ("product/bf16/8192x8192", 792.0),
    ("product/bf16/4096x4096x", 735.0),
    ("product/bf16/4096x14336", 672.0),
    ("product/bf16", 691.0),
    ("product/fp16", 780.0),
    ("product/tf32", 400.0),
    ("product/fp8", 1500.0),
    ("memory/copy", 4280.0),
    ("memory/read", 4400.0),
    ("memory/write", 4300.0),
    ("host/to-device", 54.5),
    ("host/to-host", 55.0),
    ("peers/one-way", 386.5),
    ("peers/both-ways", 775.0),
    ("sustained", 690.0),
    ("corruption", 900.0),
    ("collectives/all_reduce/2/64MiB", 270.0),
    ("collectives/all_reduce/2", 328.0),
    ("collectives", 362.0),
)

Spoil = Callable[[Question, tuple[int, ...], Answer], Answer | None]


def healthy_answer(question: Question, gpus: tuple[int, ...]) -> Answer:
    figure = next(figure for start, figure in HEALTHY_FIGURES if question.key.startswith(start))
    # A percent of spread between GPUs and between samples, as real ones have.
    level = figure * (1 + 0.004 * (sum(gpus) % 4))
    samples = [level * (1 + 0.003 * step) for step in (-1, 0, 1, 0)]
    marks: dict[str, Any] = {}
    if question.key.startswith("corruption"):
        marks = {"compared": 9000, "wrong": 0, "digest": "5eed"}
    elif question.key.startswith("collectives"):
        marks = {"wrong": 0}
    return Answer(key=question.key, gpus=gpus, samples=samples, marks=marks)


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
