"""A scripted eight-GPU H200 node with healthy metrics, and ways to modify one of them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fake_gpu import FakeGpu
from fake_node import FakeNode, Program, healthy_result

from meltcore.common.process import CompletedRun
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.node import Certificate, Tier
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import Evaluation, FleetLevel, LevelResult, RunResult, StreamLoad
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

    others.setdefault("program", correct_answers(gpus[0].name))
    return FakeNode(fakes=list(gpus), measure=measure, **others)


def correct_answers(device: str) -> Program:
    """Return a program that writes what `meltcore demo` writes after a run on `device` that passed."""
    return lambda command, _environment: demo_run(command, code=0, share=0.99, device=device)


def demo_run(
    command: Sequence[str],
    code: int,
    share: float,
    reasons: Sequence[str] = (),
    device: str = "NVIDIA H200",
    loaded_share: float = 0.99,
    failed: int = 0,
) -> CompletedRun:
    """Write a run of the demo on `device`: `share` of 200 unloaded answers is right, and `loaded_share` under load."""
    folder = RunFolder.create(Path(command[command.index("--out") + 1]), "demo")
    level = LevelResult(
        concurrency=10,
        requests=300,
        succeeded=300,
        failed=0,
        peak_in_flight=10,
        duration_s=3.0,
        output_tokens_per_s=900.0,
        total_tokens_per_s=900.0,
        prompt_tokens=300,
        output_tokens=2700,
        accuracy=loaded_share,
    )
    mixed = FleetLevel(
        part="mixed",
        label="mixed, 10 connections",
        connections=10,
        send_s=3.0,
        duration_s=3.0,
        peak_in_flight=10,
        streams=[StreamLoad(name="sums", model="sums", level=level)],
        released_s=0.0,
    )
    result = RunResult(
        command="demo",
        status="complete",
        started="2026-11-21T00:00:00+00:00",
        duration_s=40.0,
        fingerprint=take_fingerprint(),
        settings={"devices": {"sums": device}} if device else {},
        evaluation=Evaluation(
            total=200, correct=round((200 - failed) * share), failed=failed, ci_low=share, ci_high=share
        ),
        mixed=[mixed],
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
