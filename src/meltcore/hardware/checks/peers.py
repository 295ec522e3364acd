"""Peer copies: does every pair of GPUs exchange data as fast as the links between them say, in each direction?"""

from collections.abc import Sequence

from meltcore.hardware import expect
from meltcore.hardware.checks.base import MeasuredCheck
from meltcore.hardware.measures import Question
from meltcore.hardware.site import Site
from meltcore.hardware.snapshot import links_between
from meltcore.results.certificate import Expectation

_BYTES = 256 * 2**20
_SECONDS = {"standard": 0.15}
_SECONDS_OF_MORE = 0.5
_BUILD_S = 0.5


class Peers(MeasuredCheck):
    name = "peers"
    title = "Peer copies"
    unit = "GB/s"
    uses = ("nvlink",)

    def not_applicable(self, site: Site) -> str:
        return "one GPU has no peer" if len(site.gpus) < 2 else ""

    def questions(self, site: Site) -> list[Question]:
        seconds = _SECONDS.get(site.tier, _SECONDS_OF_MORE)
        pairs = [(first, second) for first in site.positions for second in site.positions if first != second]
        one_way = [_question("peers/one-way", pair, 1, seconds) for pair in pairs]
        both_ways = [_question("peers/both-ways", pair, 2, seconds) for pair in pairs if pair[0] < pair[1]]
        return one_way + both_ways

    def seconds(self, site: Site) -> float:
        return len(self.questions(site)) * (_SECONDS.get(site.tier, _SECONDS_OF_MORE) + _BUILD_S)

    def topology(self, site: Site, question: Question, gpus: Sequence[int]) -> Expectation | None:
        first, second = gpus
        links = links_between(site.snapshot.gpus, first, second)
        return expect.peer(link_speed(site, first, second), len(links), int(question.settings["ways"]))

    def recorded(self, question: Question) -> bool:
        """A path by PCIe alone depends on bridges, ACS and the host; no figure is known for it."""
        return True


def _question(key: str, pair: tuple[int, int], ways: int, seconds: float) -> Question:
    return Question(key=key, gpus=pair, settings={"ways": ways, "bytes": _BYTES, "seconds": seconds})


def link_speed(site: Site, first: int, second: int) -> float | None:
    """GB/s of all links from one GPU to another, one way; None where there is none or a speed is unknown."""
    speeds = [link.speed_gbps for link in links_between(site.snapshot.gpus, first, second)]
    known = [speed for speed in speeds if speed is not None]
    return sum(known) if known and len(known) == len(speeds) else None
