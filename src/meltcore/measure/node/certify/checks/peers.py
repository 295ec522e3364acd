"""Peer copies: does every pair of GPUs exchange data as fast as its links allow, in each direction?"""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from meltcore.measure.documents.node import Expectation
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult
from meltcore.measure.node.snapshot import links_between

_BYTES = 256 * 2**20
_BIDIRECTIONAL_GROUPS = 6
_GROUP_S, _WARMUP_S = 0.02, 0.03  # eight GPUs have 84 pairs to measure


class PeersCheck(MeasuredCheck):
    """Times copies between every pair of GPUs by the copy engines."""

    name = "peers"
    title = "Peer copies"
    unit = "GB/s"
    links = ("nvlink",)
    needs_peers = True
    seconds = (0.0, 0.15, 0.5)
    setup_s = 0.5
    is_recorded = True  # a path through PCIe depends on bridges, ACS and the host: it has no expectation

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request per ordered pair in one direction, and one per unordered pair in both directions."""
        settings = {"bytes": _BYTES, "seconds": self.request_s(context)}
        pairs = [(first, second) for first in context.gpu_indices for second in context.gpu_indices if first != second]
        unidirectional = [
            ProbeRequest(key="peers/unidirectional", gpus=pair, settings={"directions": 1, **settings})
            for pair in pairs
        ]
        bidirectional = [
            ProbeRequest(key="peers/bidirectional", gpus=pair, settings={"directions": 2, **settings})
            for pair in pairs
            if pair[0] < pair[1]
        ]
        return unidirectional + bidirectional

    def topology(self, context: CertifyContext, request: ProbeRequest, gpus: Sequence[int]) -> Expectation | None:
        """Return the expectation from the number and speed of NVLinks, or None without NVLinks of known speed."""
        first, second = gpus
        links = links_between(context.snapshot.gpus, first, second)
        return expectations.peer_expectation(
            link_gbps(context, first, second), len(links), int(request.settings["directions"])
        )


def link_gbps(context: CertifyContext, first: int, second: int) -> float | None:
    """Return the GB/s of all links from one GPU to another in one direction.

    Returns None if there are no links, or if their speeds are unknown.
    """
    speeds = [link.speed_gbps for link in links_between(context.snapshot.gpus, first, second)]
    known_speeds = [speed for speed in speeds if speed is not None]
    return sum(known_speeds) if known_speeds and len(known_speeds) == len(speeds) else None


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the GB/s from the first GPU of a pair to the second GPU. Settings: directions (1, 2), bytes, seconds.

    With two directions, the result is the sum of the two rates.
    """
    import torch

    from meltcore.measure.node.certify.gpu_timing import measure_rates

    settings = request.settings
    first, second = request.gpus
    size, seconds = int(settings["bytes"]), float(settings["seconds"])
    forward, backward = PeerCopy(first, second, size), PeerCopy(second, first, size)
    if int(settings["directions"]) == 1:

        def launch(_device: int) -> None:
            forward.enqueue()

        samples = measure_rates((first,), launch, size / 1e9, seconds, launch_group_s=_GROUP_S, warmup_s=_WARMUP_S)[0]
    else:
        samples = _time_both_directions(forward, backward, 2 * size / 1e9, seconds)
    direct = torch.cuda.can_device_access_peer(first, second)
    yield ProbeResult(key=request.key, gpus=request.gpus, samples=samples, details={"direct": int(direct)})


class PeerCopy:
    """A copy from one GPU to another, in the source's current stream.

    It calls the CUDA runtime, because a copy by torch makes streams of both GPUs wait for each other. With torch, both
    directions together reached 11 % less than a program that calls the runtime (two H200s, 2026-11-22).
    """

    def __init__(self, first: int, second: int, size: int) -> None:
        import torch

        self.first, self.second = first, second
        self._source, self._target = (
            torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}") for gpu in (first, second)
        )
        self._target[:1].copy_(self._source[:1])  # makes torch enable peer access where it is possible

    def enqueue(self) -> None:
        """Enqueue the copy once. Raises RuntimeError if the runtime refuses it."""
        import torch
        from cuda.bindings import runtime

        target, source = (self._target.data_ptr(), self.second), (self._source.data_ptr(), self.first)
        with torch.cuda.device(self.first):
            stream = torch.cuda.current_stream().cuda_stream
            (status,) = runtime.cudaMemcpyPeerAsync(*target, *source, self._source.nbytes, stream)
        if status != runtime.cudaError_t.cudaSuccess:
            raise RuntimeError(f"a copy from GPU {self.first} to GPU {self.second} gave {status.name}")


def _time_both_directions(forward: PeerCopy, backward: PeerCopy, work: float, seconds: float) -> list[float]:
    """Return samples of the total rate of both directions, in units of `work` per second.

    The host's clock times groups of copies, because events of two devices share no clock. A group lasts so long that
    its launch and synchronization hardly count. Each direction has a stream of its own: in the null stream a copy
    between two GPUs occupies both GPUs.
    """
    import torch

    cuda: Any = torch.cuda  # Stream has no annotations
    copies = [(copy, cuda.Stream(device=copy.first)) for copy in (forward, backward)]
    for copy, _ in copies:
        torch.cuda.synchronize(copy.first)
    count = 1
    samples: list[float] = []
    while len(samples) < _BIDIRECTIONAL_GROUPS:
        start_s = time.monotonic()
        for _ in range(count):
            for copy, stream in copies:
                with torch.cuda.stream(stream):
                    copy.enqueue()
        for _, stream in copies:
            stream.synchronize()
        elapsed_s = time.monotonic() - start_s
        if elapsed_s < max(_GROUP_S, seconds / _BIDIRECTIONAL_GROUPS / 2):
            count *= 2
            continue
        samples.append(count * work / elapsed_s)
    return samples
