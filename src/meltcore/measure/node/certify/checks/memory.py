"""Memory bandwidth: does every GPU's device memory run as fast as its bus allows?"""

from collections.abc import Iterator, Sequence

from meltcore.measure.documents.node import Expectation
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult

_BYTES = 2 * 2**30  # per buffer: many times any L2 cache


class MemoryCheck(MeasuredCheck):
    """Times copies, reads and writes in device memory, on all GPUs concurrently."""

    name = "memory"
    title = "Memory bandwidth"
    unit = "GB/s"
    seconds = (0.5, 1.0, 3.0)
    setup_s = 1.0

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request per operation."""
        seconds = self.request_s(context)
        return [
            ProbeRequest(
                key=f"memory/{operation}",
                gpus=context.gpu_indices,
                per_gpu=True,
                settings={"op": operation, "bytes": _BYTES, "seconds": seconds},
            )
            for operation in (("copy",) if context.tier == "quick" else ("copy", "read", "write"))
        ]

    def topology(self, context: CertifyContext, request: ProbeRequest, gpus: Sequence[int]) -> Expectation | None:
        """Return the expectation from bus width and memory clock, or None if either is unknown."""
        return expectations.memory_expectation(context.snapshot.gpus[gpus[0]], str(request.settings["op"]))


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the GB/s of each GPU, where reads and writes count. Settings: op (copy, read, write), bytes, seconds."""
    import torch

    from meltcore.measure.node.certify.gpu_timing import measure_rates

    settings = request.settings
    operation, size = str(settings["op"]), int(settings["bytes"])
    sources = {device: torch.ones(size // 4, device=f"cuda:{device}") for device in request.gpus}
    targets = {device: torch.empty_like(source) for device, source in sources.items()} if operation == "copy" else {}
    sums = {device: torch.empty((), device=f"cuda:{device}") for device in request.gpus}

    def launch(device: int) -> None:
        if operation == "copy":
            targets[device].copy_(sources[device])
        elif operation == "read":
            torch.sum(sources[device], dim=0, out=sums[device])
        else:
            sources[device].fill_(1.0)

    work = (2 if operation == "copy" else 1) * size / 1e9
    rates_per_gpu = measure_rates(request.gpus, launch, work, float(settings["seconds"]))
    for device, samples in zip(request.gpus, rates_per_gpu, strict=True):
        yield ProbeResult(key=request.key, gpus=(device,), samples=samples)
