"""Certificates of a scripted node that is healthy but for what a test spoils."""

from pathlib import Path

from meltcore.hardware.certify import certify
from meltcore.hardware.fake import FakeGpu
from meltcore.hardware.fake_node import FakeNode, healthy_answer
from meltcore.hardware.measures import Answer, Question
from meltcore.results.certificate import Certificate, Tier


def node(gpus: list[FakeGpu], slow: tuple[int, ...] = ()) -> FakeNode:
    def measured(question: Question, target: tuple[int, ...]) -> Answer | None:
        answer = healthy_answer(question, target)
        if target == slow:
            answer.samples = [1.0]
        return answer

    return FakeNode(fakes=gpus, measured=measured)


def h200s(count: int) -> list[FakeGpu]:
    return [FakeGpu(uuid=f"GPU-{index}-<fake>", bus_id=f"0000:{index:02x}:00.0") for index in range(count)]


def certificate(folder: Path, tier: Tier = "standard", gpus: int = 4, slow: tuple[int, ...] = ()) -> Certificate:
    scripted = node(h200s(gpus), slow)
    return certify(scripted, scripted.gpus(), tier, folder)
