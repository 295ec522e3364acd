"""Silent data corruption: does every GPU compute the same bits each time, and the same as the others of its product?"""

from collections import Counter
from collections.abc import Sequence

from meltcore.hardware import faults
from meltcore.hardware.checks.base import MeasuredCheck
from meltcore.hardware.judge import Judged
from meltcore.hardware.measures import Answer, Question, Setting
from meltcore.hardware.site import Site
from meltcore.results.certificate import Expectation, Finding

_SECONDS = {"standard": 10.0, "full": 120.0}
_SOAK_SHARE = 0.2
_SIZE = 4096


class Corruption(MeasuredCheck):
    name = "corruption"
    title = "Silent data corruption"
    unit = "products/s compared"
    slower = 1.2

    def questions(self, site: Site) -> list[Question]:
        settings: dict[str, Setting] = {"dtype": "bf16", "size": _SIZE, "seconds": self._long(site)}
        return [Question(key="corruption/repeat", gpus=site.positions, each=True, settings=settings)]

    def seconds(self, site: Site) -> float:
        return self._long(site) + 10.0

    def _long(self, site: Site) -> float:
        return _SOAK_SHARE * 3600 * site.hours if site.tier == "soak" else _SECONDS.get(site.tier, 10.0)

    def expectations(self, site: Site, question: Question, gpus: Sequence[int]) -> tuple[Expectation, ...]:
        """The speed of comparing is no matter."""
        return ()

    def recorded(self, question: Question) -> bool:
        return True

    def extra(self, site: Site, answers: Sequence[Answer], judged: list[Judged]) -> list[Finding]:
        marks = {answer.gpus: answer.marks for answer in answers}
        usual = _usual_digests(site, answers)
        for one in judged:
            found = marks.get(tuple(one.row.gpus), {})
            if one.row.verdict not in ("RECORDED", "INVALID"):
                continue
            digest, wrong = found.get("digest"), found.get("wrong")
            if wrong is None or digest is None:
                one.lower("UNKNOWN", faults.NO_READING, "the probe did not say what it compared")
            elif wrong:
                one.lower(
                    "FAIL", faults.WRONG_RESULT, f"{wrong} of {found.get('compared')} equal products came out unequal"
                )
            elif digest not in usual[_kind(site, one.row.gpus[0])]:
                one.lower("FAIL", faults.WRONG_RESULT, "computes other bits than the other GPUs of its product")
            elif one.row.verdict == "RECORDED":
                one.row.verdict = "PASS"
                one.row.note = f"{found.get('compared')} products, every bit the same"
        return []


def _kind(site: Site, position: int) -> tuple[str, object]:
    gpu = site.snapshot.gpus[position]
    return gpu.name, gpu.facts.get("sm_count")


def _usual_digests(site: Site, answers: Sequence[Answer]) -> dict[tuple[str, object], set[object]]:
    """By product: the result most GPUs have. Where two results tie, neither is right beyond doubt, so there is none."""
    counts: dict[tuple[str, object], Counter[object]] = {}
    for answer in answers:
        if "digest" in answer.marks:
            counts.setdefault(_kind(site, answer.gpus[0]), Counter())[answer.marks["digest"]] += 1
    usual: dict[tuple[str, object], set[object]] = {_kind(site, position): set() for position in site.positions}
    for kind, counted in counts.items():
        ranked = counted.most_common(2)
        if len(ranked) == 1 or ranked[0][1] > ranked[1][1]:
            usual[kind] = {ranked[0][0]}
    return usual
