"""Certificates of a scripted node that is healthy but for what a test spoils."""

from pathlib import Path

from fake_gpu import FakeGpu
from fake_node import FakeNode, healthy_result

from meltcore.measure.documents.node import Certificate, Tier
from meltcore.measure.node.certify.checks.run import certify
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult


def node(gpus: list[FakeGpu], slow: tuple[int, ...] = ()) -> FakeNode:
    def measure(request: ProbeRequest, target: tuple[int, ...]) -> ProbeResult | None:
        result = healthy_result(request, target)
        if target == slow:
            result.samples = [1.0]
        return result

    return FakeNode(fakes=gpus, measure=measure)


def h200s(count: int) -> list[FakeGpu]:
    return [FakeGpu(uuid=f"GPU-{index}-<fake>", bus_id=f"0000:{index:02x}:00.0") for index in range(count)]


def certificate(folder: Path, tier: Tier = "standard", gpus: int = 4, slow: tuple[int, ...] = ()) -> Certificate:
    scripted = node(h200s(gpus), slow)
    return certify(scripted, scripted.gpus(), tier, folder)
