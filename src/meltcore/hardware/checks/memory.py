"""Memory bandwidth: does every GPU's own memory run as fast as its bus says?"""

from collections.abc import Sequence

from meltcore.hardware import expect
from meltcore.hardware.checks.base import MeasuredCheck
from meltcore.hardware.measures import Question
from meltcore.hardware.site import Site
from meltcore.results.certificate import Expectation

_BYTES = 2 * 2**30  # a buffer: many times any L2 cache
_SECONDS = {"quick": 0.5, "standard": 1.0}
_SECONDS_OF_MORE = 3.0
_BUILD_S = 1.0


class Memory(MeasuredCheck):
    name = "memory"
    title = "Memory bandwidth"
    unit = "GB/s"

    def questions(self, site: Site) -> list[Question]:
        kinds = ("copy",) if site.tier == "quick" else ("copy", "read", "write")
        seconds = _SECONDS.get(site.tier, _SECONDS_OF_MORE)
        return [
            Question(
                key=f"memory/{kind}",
                gpus=site.positions,
                each=True,
                settings={"kind": kind, "bytes": _BYTES, "seconds": seconds},
            )
            for kind in kinds
        ]

    def seconds(self, site: Site) -> float:
        return len(self.questions(site)) * (_SECONDS.get(site.tier, _SECONDS_OF_MORE) + _BUILD_S)

    def topology(self, site: Site, question: Question, gpus: Sequence[int]) -> Expectation | None:
        return expect.memory(site.snapshot.gpus[gpus[0]], str(question.settings["kind"]))
