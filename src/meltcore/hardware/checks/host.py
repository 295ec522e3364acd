"""Host-device copies: does every GPU's PCIe link carry what its generation and width say?"""

from collections.abc import Sequence
from pathlib import Path

from meltcore.hardware import expect
from meltcore.hardware.checks.base import MeasuredCheck
from meltcore.hardware.measures import Question
from meltcore.hardware.site import Site
from meltcore.results.certificate import Expectation

_BYTES = 256 * 2**20
_SECONDS = {"quick": 0.2, "standard": 0.5}
_SECONDS_OF_MORE = 2.0
_BUILD_S = 0.5  # allocating, and warming up


class Host(MeasuredCheck):
    name = "host"
    title = "Host-device copies"
    unit = "GB/s"
    uses = ("pcie",)

    def questions(self, site: Site) -> list[Question]:
        seconds = _SECONDS.get(site.tier, _SECONDS_OF_MORE)
        return [
            Question(
                key=f"host/{way}",
                gpus=(gpu,),
                settings={"way": way, "bytes": _BYTES, "seconds": seconds, "cpus": near_cpus(site, gpu)},
            )
            for gpu in site.positions
            for way in ("to-device", "to-host")
        ]

    def seconds(self, site: Site) -> float:
        return len(self.questions(site)) * (_SECONDS.get(site.tier, _SECONDS_OF_MORE) + _BUILD_S)

    def topology(self, site: Site, question: Question, gpus: Sequence[int]) -> Expectation | None:
        return expect.host(site.snapshot.gpus[gpus[0]])


def near_cpus(site: Site, gpu: int) -> str:
    """The processors of the GPU's own socket, as the kernel lists them; empty where it does not tell.

    From the memory of another socket a copy also crosses the link between the two, which is no fault of the GPU's.
    """
    bus_id = site.snapshot.gpus[gpu].facts.get("bus_id")
    return (site.node.read(Path(f"/sys/bus/pci/devices/{bus_id}/local_cpulist")) or "").strip()
