"""Concurrent host copies of all GPUs, in both directions: what do sockets, switches and host memory carry together?"""

from collections.abc import Iterator
from typing import Any

from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.checks.host import local_cpus, pin_to
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult, Setting

_BYTES = 256 * 2**20
_WARMUP_S = 0.1


class HostLoadCheck(MeasuredCheck):
    """Times copies to and from every GPU, all at the same time. Host memory limits them, so no ceiling is known."""

    name = "host_load"
    title = "Concurrent host-device copies of all GPUs"
    unit = "GB/s"
    links = ("pcie",)
    seconds = (0.0, 1.0, 3.0)
    setup_s = 3.0
    is_recorded = True  # a baseline judges it

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request."""
        settings: dict[str, Setting] = {"bytes": _BYTES, "seconds": self.request_s(context)}
        settings |= {f"cpus/{gpu}": local_cpus(context, gpu) for gpu in context.gpu_indices}
        return [ProbeRequest(key="host_load/both", gpus=context.gpu_indices, per_gpu=True, settings=settings)]

    def topology(self, *_arguments: object) -> None:
        """Return None, since nothing says how much the memory of the host carries."""


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the GB/s of each GPU, both directions added. Settings: bytes, seconds, cpus/GPU."""
    import torch

    from meltcore.measure.node.certify.gpu_timing import measure_rates

    settings, size = request.settings, int(request.settings["bytes"])
    cuda: Any = torch.cuda  # Stream has no annotations
    copies = {}
    for device in request.gpus:
        pin_to(str(settings[f"cpus/{device}"]))
        pinned = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        on_device = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(2)]
        copies[device] = (pinned, on_device, cuda.Stream(device=device))
    pin_to("")

    def launch(device: int) -> None:
        (to_device, from_device), (target, source), back = copies[device]
        current = cuda.current_stream(device)
        back.wait_stream(current)
        target.copy_(to_device, non_blocking=True)
        with torch.cuda.stream(back):
            from_device.copy_(source, non_blocking=True)
        current.wait_stream(back)

    rates_per_gpu = measure_rates(request.gpus, launch, 2 * size / 1e9, float(settings["seconds"]), warmup_s=_WARMUP_S)
    for device, samples in zip(request.gpus, rates_per_gpu, strict=True):
        yield ProbeResult(key=request.key, gpus=(device,), samples=samples)
