"""Does a GPU compute the same bits every time, and the same as its peers? Samples are products compared a second."""

import hashlib
import time
from collections.abc import Iterator

import torch

from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.probes.matrices import random_matrix

_BETWEEN_LOOKS = 100  # products


class _Repeated:
    """One product on one GPU, over and over, each result compared with the first, bit for bit, on the GPU."""

    def __init__(self, dtype: str, size: int, device: int) -> None:
        self._left = random_matrix(size, size, dtype, device, seed=1)
        self._right = random_matrix(size, size, dtype, device, seed=2)
        self._first = torch.mm(self._left, self._right).view(torch.int16)
        self._out = torch.empty(size, size, device=f"cuda:{device}", dtype=self._left.dtype)
        self._wrong = torch.zeros((), device=f"cuda:{device}", dtype=torch.int64)

    def once(self) -> None:
        torch.mm(self._left, self._right, out=self._out)
        self._wrong += (self._out.view(torch.int16) != self._first).any()

    def wrong(self) -> int:
        return int(self._wrong)

    def digest(self) -> str:
        return hashlib.blake2b(self._first.cpu().numpy().tobytes(), digest_size=16).hexdigest()


def measure(question: Question) -> Iterator[Answer]:
    """All GPUs at once: settings dtype (two bytes wide), size, seconds."""
    ask = question.settings
    jobs = {device: _Repeated(str(ask["dtype"]), int(ask["size"]), device) for device in question.gpus}
    digests = {device: job.digest() for device, job in jobs.items()}
    began_s = time.monotonic()
    count = 0
    while (passed_s := time.monotonic() - began_s) < float(ask["seconds"]):
        for _ in range(_BETWEEN_LOOKS):
            for job in jobs.values():
                job.once()
        count += _BETWEEN_LOOKS
        for device in jobs:
            torch.cuda.synchronize(device)
    for device, job in jobs.items():
        marks: dict[str, str | int] = {"compared": count, "wrong": job.wrong(), "digest": digests[device]}
        yield Answer(key=question.key, gpus=(device,), samples=[count / max(passed_s, 1e-3)], marks=marks)
