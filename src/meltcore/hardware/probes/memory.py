"""How fast a GPU's own memory is: GB/s, every byte read and every byte written counted."""

from collections.abc import Iterator

import torch

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.timing import Launch, rates


def measure(question: Question) -> Iterator[Answer]:
    """All GPUs at once: settings kind (copy, read, write), bytes, seconds."""
    ask = question.settings
    kind, size = str(ask["kind"]), int(ask["bytes"])
    sources = {device: torch.ones(size // 4, device=f"cuda:{device}") for device in question.gpus}
    targets = {device: torch.empty_like(source) for device, source in sources.items()} if kind == "copy" else {}
    sums = {device: torch.empty((), device=f"cuda:{device}") for device in question.gpus}
    launches: dict[str, Launch] = {
        "copy": lambda device: _discard(targets[device].copy_(sources[device])),
        "read": lambda device: _discard(torch.sum(sources[device], dim=0, out=sums[device])),
        "write": lambda device: _discard(sources[device].fill_(1.0)),
    }
    work = (2 if kind == "copy" else 1) * size / 1e9
    found = rates(question.gpus, launches[kind], work, float(ask["seconds"]))
    for device, samples in zip(question.gpus, found, strict=True):
        yield Answer(key=question.key, gpus=(device,), samples=samples)


def _discard(result: torch.Tensor) -> None:
    """What was enqueued is all that is wanted."""
