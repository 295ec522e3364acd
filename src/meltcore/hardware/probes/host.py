"""How fast a GPU and the host's pinned memory exchange data: GB/s, one way, one GPU at a time."""

from collections.abc import Iterator
from functools import lru_cache

import torch

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.timing import rates

_WARM_S = 0.1  # a copy engine has no clock to raise


@lru_cache(maxsize=1)
def _pinned(size: int) -> torch.Tensor:
    """Pinning takes longer than measuring, so one buffer serves all GPUs."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def measure(question: Question) -> Iterator[Answer]:
    """One GPU: settings way (to-device, to-host), bytes, seconds."""
    ask = question.settings
    (device,) = question.gpus
    size = int(ask["bytes"])
    host = _pinned(size)
    ours = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    target, source = (ours, host) if ask["way"] == "to-device" else (host, ours)

    def launch(device: int) -> None:
        target.copy_(source, non_blocking=True)

    found = rates(question.gpus, launch, size / 1e9, float(ask["seconds"]), warm_s=_WARM_S)
    yield Answer(key=question.key, gpus=question.gpus, samples=found[0])
