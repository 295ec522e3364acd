"""How fast a GPU and the host's pinned memory exchange data: GB/s, one way, one GPU at a time."""

import os
from collections.abc import Iterator
from functools import cache

import torch

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.timing import rates

_WARM_S = 0.1  # a copy engine has no clock to raise
_MAY_USE = os.sched_getaffinity(0)


@cache
def _pinned(size: int, cpus: str) -> torch.Tensor:
    """On the socket of `cpus`. Pinning takes longer than measuring, so one buffer serves all GPUs of a socket."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def cpus_of(text: str) -> set[int]:
    """`0-3,8` as the kernel lists processors."""
    spans = [part.partition("-") for part in text.split(",") if part]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}


def _stay_near(cpus: str) -> None:
    """Pages come from the memory of the processor that asks for them. What this job may not use is left out."""
    near = cpus_of(cpus) & _MAY_USE
    os.sched_setaffinity(0, near or _MAY_USE)


def measure(question: Question) -> Iterator[Answer]:
    """One GPU: settings way (to-device, to-host), bytes, seconds, cpus (of its own socket)."""
    ask = question.settings
    (device,) = question.gpus
    size, cpus = int(ask["bytes"]), str(ask["cpus"])
    _stay_near(cpus)
    host = _pinned(size, cpus)
    ours = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    target, source = (ours, host) if ask["way"] == "to-device" else (host, ours)

    def launch(device: int) -> None:
        target.copy_(source, non_blocking=True)

    found = rates(question.gpus, launch, size / 1e9, float(ask["seconds"]), warm_s=_WARM_S)
    yield Answer(key=question.key, gpus=question.gpus, samples=found[0])
