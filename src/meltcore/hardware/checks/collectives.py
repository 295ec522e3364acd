"""NCCL collectives: do the GPUs work together as fast as the links say, and are the sums right?

NVLink multicast (NVLS) is off in every group, so the figures are those of rings.
"""

from collections.abc import Sequence
from itertools import pairwise

from meltcore.hardware import expect, faults
from meltcore.hardware.checks.base import MeasuredCheck
from meltcore.hardware.checks.peers import link_speed
from meltcore.hardware.judge import Judged
from meltcore.hardware.measures import Answer, Question
from meltcore.hardware.site import Site
from meltcore.results.certificate import Expectation, Finding

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_JUDGED_FROM = _GIB  # smaller ones are bound by latency, for which no rule is known
_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter")
_ALL_SIZES = (*(4 * _KIB * 4**step for step in range(9)), _GIB, 4 * _GIB)  # 4 KiB to 256 MiB, 1 GiB, 4 GiB
_SOME_SIZES = (4 * _KIB, _MIB, 64 * _MIB, 256 * _MIB, _GIB)
_SECONDS = {"quick": 0.5, "standard": 0.2}
_SECONDS_OF_MORE = 0.5
_BUILD_S = 1.0
_GROUP_S = 15.0  # starting the processes of a group and connecting them


class Collectives(MeasuredCheck):
    name = "collectives"
    title = "NCCL collectives"
    unit = "GB/s bus"
    uses = ("nvlink",)

    def not_applicable(self, site: Site) -> str:
        return "one GPU has no peer" if len(site.gpus) < 2 else ""

    def questions(self, site: Site) -> list[Question]:
        seconds = _SECONDS.get(site.tier, _SECONDS_OF_MORE)
        operations = ("all_reduce",) if site.tier == "quick" else _OPERATIONS
        sizes = {"quick": (_GIB,), "standard": _SOME_SIZES}.get(site.tier, _ALL_SIZES)
        return [
            Question(
                key=f"collectives/{operation}/{count}/{size_words(size)}",
                gpus=tuple(range(count)),
                settings={"op": operation, "bytes": size, "seconds": seconds},
            )
            for count in _counts(site)
            for operation in operations
            for size in sizes
        ]

    def seconds(self, site: Site) -> float:
        each = _SECONDS.get(site.tier, _SECONDS_OF_MORE) + _BUILD_S
        return len(self.questions(site)) * each + len(_counts(site)) * _GROUP_S

    def topology(self, site: Site, question: Question, gpus: Sequence[int]) -> Expectation | None:
        if int(question.settings["bytes"]) < _JUDGED_FROM:
            return None
        speeds = [link_speed(site, first, second) for first, second in pairwise(gpus)]
        known = [speed for speed in speeds if speed is not None]
        slowest = min(known) if len(known) == len(speeds) else None
        return expect.collective(slowest, str(question.settings["op"]), len(gpus))

    def recorded(self, question: Question) -> bool:
        """Small ones, and rings over PCIe: no rule is known; a baseline judges them."""
        return True

    def extra(self, site: Site, answers: Sequence[Answer], judged: list[Judged]) -> list[Finding]:
        wrong = {answer.key: int(answer.marks.get("wrong", 0)) for answer in answers}
        for one in judged:
            if wrong.get(one.row.key):
                note = f"{wrong[one.row.key]:,} elements came out wrong"
                one.lower("FAIL", faults.WRONG_RESULT, note)
        return []


def _counts(site: Site) -> list[int]:
    """Sizes of the groups: all GPUs, and from the standard tier on also two and four of them."""
    everyone = len(site.gpus)
    return [everyone] if site.tier == "quick" else sorted({count for count in (2, 4, everyone) if count <= everyone})


def size_words(size: int) -> str:
    for unit, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if size >= unit:
            return f"{size // unit}{name}"
    return f"{size}B"
