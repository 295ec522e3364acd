"""How fast two GPUs exchange data by the copy engines: GB/s, one way or both ways at once (the sum)."""

import time
from collections.abc import Iterator

import torch

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.timing import rates

_BOTH_WAYS_GROUPS = 6
_GROUP_S, _WARM_S = 0.02, 0.03  # eight GPUs have 84 pairs to measure


def measure(question: Question) -> Iterator[Answer]:
    """A pair (from, to): settings ways (1, 2), bytes, seconds."""
    ask = question.settings
    first, second = question.gpus
    size = int(ask["bytes"])
    there = (_buffer(first, size), _buffer(second, size))
    back = (_buffer(second, size), _buffer(first, size))
    if int(ask["ways"]) == 1:

        def launch(device: int) -> None:
            there[1].copy_(there[0], non_blocking=True)

        samples = rates((first,), launch, size / 1e9, float(ask["seconds"]), group_s=_GROUP_S, warm_s=_WARM_S)[0]
    else:
        samples = _both_ways(there, back, size, float(ask["seconds"]))
    direct = torch.cuda.can_device_access_peer(first, second)
    yield Answer(key=question.key, gpus=question.gpus, samples=samples, marks={"direct": int(direct)})


def _buffer(device: int, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")


def _both_ways(
    there: tuple[torch.Tensor, torch.Tensor], back: tuple[torch.Tensor, torch.Tensor], size: int, seconds: float
) -> list[float]:
    """By the host's clock around both: events of two devices share no clock. A group is long against its ends.

    Each direction has a stream of its own on its source: a copy between devices waits for the current streams of both.
    """
    streams = [torch.cuda.Stream(device=there[0].device), torch.cuda.Stream(device=back[0].device)]
    count = 1
    samples: list[float] = []
    while len(samples) < _BOTH_WAYS_GROUPS:
        began_s = time.monotonic()
        for _ in range(count):
            for stream, (source, target) in zip(streams, (there, back), strict=True):
                with torch.cuda.stream(stream):
                    target.copy_(source, non_blocking=True)
        for stream in streams:
            stream.synchronize()
        took_s = time.monotonic() - began_s
        if took_s < seconds / _BOTH_WAYS_GROUPS / 2:
            count *= 2
            continue
        samples.append(2 * count * size / took_s / 1e9)
    return samples
