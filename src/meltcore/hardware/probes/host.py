"""How fast a GPU and the host's pinned memory exchange data: GB/s, one way, one GPU at a time."""

from collections.abc import Iterator

import torch

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.timing import rates


def measure(question: Question) -> Iterator[Answer]:
    """One GPU: settings way (to-device, to-host), bytes, seconds."""
    ask = question.settings
    (device,) = question.gpus
    size = int(ask["bytes"])
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    ours = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    target, source = (ours, host) if ask["way"] == "to-device" else (host, ours)

    def launch(device: int) -> None:
        target.copy_(source, non_blocking=True)

    found = rates(question.gpus, launch, size / 1e9, float(ask["seconds"]))
    yield Answer(key=question.key, gpus=question.gpus, samples=found[0])
