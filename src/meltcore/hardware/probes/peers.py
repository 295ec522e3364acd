"""How fast two GPUs exchange data by the copy engines: GB/s, one way or both ways at once (the sum)."""

import time
from collections.abc import Iterator

import torch
from cuda.bindings import runtime

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.timing import rates

_BOTH_WAYS_GROUPS = 6
_GROUP_S, _WARM_S = 0.02, 0.03  # eight GPUs have 84 pairs to measure


def measure(question: Question) -> Iterator[Answer]:
    """A pair (from, to): settings ways (1, 2), bytes, seconds."""
    ask = question.settings
    first, second = question.gpus
    size, seconds = int(ask["bytes"]), float(ask["seconds"])
    there, back = Way(first, second, size), Way(second, first, size)
    if int(ask["ways"]) == 1:
        samples = rates((first,), lambda _: there.copy(), size / 1e9, seconds, group_s=_GROUP_S, warm_s=_WARM_S)[0]
    else:
        samples = _both_ways(there, back, 2 * size / 1e9, seconds)
    direct = torch.cuda.can_device_access_peer(first, second)
    yield Answer(key=question.key, gpus=question.gpus, samples=samples, marks={"direct": int(direct)})


class Way:
    """Copies from one GPU to another, in the source's current stream.

    By the runtime itself: a copy of torch's makes streams of both GPUs wait for each other, and both ways came 11 %
    short of what a program gave that calls the runtime (two H200s, 2026-11-22).
    """

    def __init__(self, first: int, second: int, size: int) -> None:
        self.first, self.second = first, second
        self._source, self._target = (_buffer(gpu, size) for gpu in (first, second))
        self._target[:1].copy_(self._source[:1])  # torch lets the two reach each other's memory, where they can

    def copy(self) -> None:
        to, source = (self._target.data_ptr(), self.second), (self._source.data_ptr(), self.first)
        with torch.cuda.device(self.first):
            stream = torch.cuda.current_stream().cuda_stream
            (status,) = runtime.cudaMemcpyPeerAsync(*to, *source, self._source.nbytes, stream)
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"a copy from GPU {self.first} to GPU {self.second} gave {status.name}")


def _buffer(gpu: int, size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")


def _both_ways(there: Way, back: Way, work: float, seconds: float) -> list[float]:
    """By the host's clock around both: events of two devices share no clock. A group is long against its ends.

    Each has a stream of its own: in the null stream a copy between two GPUs has both of them to itself.
    """
    ways = [(way, torch.cuda.Stream(device=way.first)) for way in (there, back)]
    for way, _ in ways:
        torch.cuda.synchronize(way.first)
    count = 1
    samples: list[float] = []
    while len(samples) < _BOTH_WAYS_GROUPS:
        began_s = time.monotonic()
        for _ in range(count):
            for way, stream in ways:
                with torch.cuda.stream(stream):
                    way.copy()
        for _, stream in ways:
            stream.synchronize()
        took_s = time.monotonic() - began_s
        if took_s < max(_GROUP_S, seconds / _BOTH_WAYS_GROUPS / 2):
            count *= 2
            continue
        samples.append(count * work / took_s)
    return samples
