"""Host-device copies: does every GPU's PCIe link reach what its generation and width allow?"""

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from meltcore.common.cores import parse_cpus
from meltcore.measure.documents.node import Expectation
from meltcore.measure.node.certify import expectations
from meltcore.measure.node.certify.check import MeasuredCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.certify.probe import ProbeRequest, ProbeResult

if TYPE_CHECKING:
    import torch

_BYTES = 256 * 2**20
_WARMUP_S = 0.1  # a copy engine has no clock that must rise first
_ALLOWED_CPUS = os.sched_getaffinity(0)


class HostCheck(MeasuredCheck):
    """Times copies between pinned host memory and each GPU, one direction and one GPU at a time."""

    name = "host"
    title = "Host-device copies"
    unit = "GB/s"
    links = ("pcie",)
    seconds = (0.2, 0.5, 2.0)
    setup_s = 0.5

    def requests(self, context: CertifyContext) -> list[ProbeRequest]:
        """Return one request per GPU and direction."""
        seconds = self.request_s(context)
        return [
            ProbeRequest(
                key=f"host/{direction}",
                gpus=(gpu,),
                settings={
                    "direction": direction,
                    "bytes": _BYTES,
                    "seconds": seconds,
                    "cpus": local_cpus(context, gpu),
                },
            )
            for gpu in context.gpu_indices
            for direction in ("host-to-device", "device-to-host")
        ]

    def topology(self, context: CertifyContext, _request: ProbeRequest, gpus: Sequence[int]) -> Expectation | None:
        """Return the expectation from PCIe generation and width, or None if either is unknown."""
        return expectations.host_expectation(context.snapshot.gpus[gpus[0]])


def local_cpus(context: CertifyContext, gpu: int) -> str:
    """Return the CPUs of the GPU's own socket in the kernel's list form, or "" if the kernel does not list them.

    Copies from another socket's memory also cross the link between sockets, which the check does not judge.
    """
    bus_id = context.snapshot.gpus[gpu].facts.get("bus_id")
    return (context.node.read(Path(f"/sys/bus/pci/devices/{bus_id}/local_cpulist")) or "").strip()


@cache
def _pinned_buffer(size: int, _cpus: str) -> "torch.Tensor":
    """Return a pinned buffer on the socket of `_cpus`. It is made once per socket, as pinning is slow."""
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def pin_to(cpus: str) -> None:
    """Run on the CPUs of a list that this job may use, so that pages come from their memory. "" means all."""
    os.sched_setaffinity(0, parse_cpus(cpus) & _ALLOWED_CPUS or _ALLOWED_CPUS)


def probe(request: ProbeRequest) -> Iterator[ProbeResult]:
    """Yield the GB/s of one GPU. Settings: direction (host-to-device, device-to-host), bytes, seconds, cpus."""
    import torch

    from meltcore.measure.node.certify.gpu_timing import measure_rates

    settings = request.settings
    (device,) = request.gpus
    size, cpus = int(settings["bytes"]), str(settings["cpus"])
    pin_to(cpus)
    on_host = _pinned_buffer(size, cpus)
    on_device = torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}")
    to_device = settings["direction"] == "host-to-device"
    target, source = (on_device, on_host) if to_device else (on_host, on_device)

    def launch(_device: int) -> None:
        target.copy_(source, non_blocking=True)

    rates_per_gpu = measure_rates(request.gpus, launch, size / 1e9, float(settings["seconds"]), warmup_s=_WARMUP_S)
    yield ProbeResult(key=request.key, gpus=request.gpus, samples=rates_per_gpu[0])
