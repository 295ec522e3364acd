"""Sustained load: does every GPU keep its speed, or does heat or power take it away?"""

from collections.abc import Sequence
from statistics import median

from meltcore.hardware import expect, faults
from meltcore.hardware.checks.base import MeasuredCheck
from meltcore.hardware.checks.product import MODEL_SHAPES
from meltcore.hardware.judge import Judged, figure
from meltcore.hardware.measures import Answer, Question, Setting
from meltcore.hardware.site import Site
from meltcore.results.certificate import Expectation, Finding

_SECONDS = {"standard": 30.0, "full": 300.0}
SOAK_SHARE = 0.8  # of a soak's hours; the rest goes to silent data corruption
_MOST_SAMPLES = 600
# A warm GPU is up to 3 % slower than a cold one (H200 SXM: 1 to 2 steps of 15 MHz, and leakage under its power limit).
_DRIFT_SHARE = 0.95
_LEAST_SAMPLES = 8  # for quarters of two


class Sustained(MeasuredCheck):
    name = "sustained"
    title = "Sustained load"
    unit = "TFLOP/s"
    slower = 1.2  # it is as long as it is asked to be

    def questions(self, site: Site) -> list[Question]:
        seconds = self._long(site)
        m, n, k = MODEL_SHAPES[-1]
        every_s = max(1.0, seconds / _MOST_SAMPLES)
        settings: dict[str, Setting] = {"dtype": "bf16", "m": m, "n": n, "k": k, "seconds": seconds, "every_s": every_s}
        return [Question(key="sustained/bf16", gpus=site.positions, each=True, settings=settings)]

    def seconds(self, site: Site) -> float:
        return self._long(site) + 10.0

    def _long(self, site: Site) -> float:
        return SOAK_SHARE * 3600 * site.hours if site.tier == "soak" else _SECONDS.get(site.tier, 30.0)

    def topology(self, site: Site, question: Question, gpus: Sequence[int]) -> Expectation | None:
        return expect.product(site.snapshot.gpus[gpus[0]], "bf16", "model")

    def extra(self, site: Site, answers: Sequence[Answer], judged: list[Judged]) -> list[Finding]:
        """The last quarter against the first."""
        for one in judged:
            quarter = len(one.row.samples) // 4
            if one.row.verdict != "PASS" or len(one.row.samples) < _LEAST_SAMPLES:
                continue
            first, last = median(one.row.samples[:quarter]), median(one.row.samples[-quarter:])
            if last < _DRIFT_SHARE * first:
                one.lower("WARN", faults.DRIFT, f"drifted from {figure(first)} to {figure(last)} over the run")
        return []
