"""What a check is, and how one that measures goes: plan, probe, judge, and fail closed at every step."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from meltcore.hardware import faults
from meltcore.hardware.conditions import Watch
from meltcore.hardware.expect import prior
from meltcore.hardware.judge import Asked, Judged, findings_of, judge, throttle
from meltcore.hardware.measures import Answer, Job, Question, encode, read_answers
from meltcore.hardware.node import Ran
from meltcore.hardware.site import Site
from meltcore.results.certificate import CheckReport, Expectation, Finding, worst

# Importing torch, making a context on each of eight GPUs, and allocating: generous, since what hangs hangs for ever.
START_LIMIT_S = 90.0


class Check(ABC):
    """One file, one check. `name` is stable; `title` is what a person reads."""

    name: str
    title: str

    def not_applicable(self, site: Site) -> str:
        """Why this machine has no such thing; empty where it has."""
        return ""

    @abstractmethod
    def run(self, site: Site) -> CheckReport:
        """Never raises for what a GPU or a program does: that becomes UNKNOWN."""

    def neutral(self, why: str) -> CheckReport:
        return CheckReport(name=self.name, title=self.title, verdict="NOT_APPLICABLE", why=why)


class MeasuredCheck(Check):
    """A check whose figures come from the probe of its name."""

    unit: str
    uses: tuple[str, ...] = ()  # of "pcie" and "nvlink": links whose error counters must be readable
    slower = 3.0  # a slow GPU must be measured, not killed

    @abstractmethod
    def questions(self, site: Site) -> list[Question]:
        """What to measure in this tier."""

    @abstractmethod
    def seconds(self, site: Site) -> float:
        """What the probe should take, its start left out."""

    def topology(self, site: Site, question: Question, gpus: Sequence[int]) -> Expectation | None:
        """What the topology says that a figure should be."""
        return None

    def recorded(self, question: Question) -> bool:
        """Whether a figure without an expectation is merely recorded."""
        return False

    def extra(self, site: Site, answers: Sequence[Answer], judged: list[Judged]) -> list[Finding]:
        """Findings that are not about a floor; may lower rows."""
        return []

    def run(self, site: Site) -> CheckReport:
        why = self.not_applicable(site)
        if why:
            return self.neutral(why)
        began_s = site.node.now_s()
        questions = self.questions(site)
        busy = site.busy()
        watch = Watch(site, self.name, self.uses)
        ran = self._probe(site, questions)
        conditions, seen, slowed = watch.close()
        busy |= site.busy()
        answers = read_answers(ran.stdout)
        judged = judge(self._asked(site, questions), answers, _why_missing(ran, self._limit_s(site)), busy)
        extra = self.extra(site, answers, judged)
        throttle(judged, slowed)
        findings = [*findings_of(self.name, judged), *extra, *seen]
        return CheckReport(
            name=self.name,
            title=self.title,
            verdict=worst([*(one.row.verdict for one in judged), *(finding.verdict for finding in findings)]),
            rows=[one.row for one in judged],
            findings=findings,
            conditions=conditions,
            duration_s=site.node.now_s() - began_s,
            why=self.left_out(site),
        )

    def left_out(self, site: Site) -> str:
        """What this tier measures and these GPUs do not have."""
        return ""

    def expectations(self, site: Site, question: Question, gpus: Sequence[int]) -> tuple[Expectation, ...]:
        states = [site.snapshot.gpus[gpu] for gpu in gpus]
        found = [
            site.baseline.expectation(states, question.key) if site.baseline is not None else None,
            prior(states, question.key),
            None if any(state.mig for state in states) else self.topology(site, question, gpus),
        ]
        return tuple(one for one in found if one is not None)

    def _asked(self, site: Site, questions: Sequence[Question]) -> list[Asked]:
        return [
            Asked(
                key=question.key,
                gpus=target,
                subject=site.label(target, _between(question)),
                unit=self.unit,
                expectations=self.expectations(site, question, target),
                recorded=self.recorded(question),
            )
            for question in questions
            for target in question.targets()
        ]

    def _limit_s(self, site: Site) -> float:
        return START_LIMIT_S + self.slower * self.seconds(site)

    def _probe(self, site: Site, questions: list[Question]) -> Ran:
        command = [sys.executable, "-m", "meltcore.hardware.probes", self.name]
        return site.node.run(command, encode(Job(questions=questions)), site.environment(), self._limit_s(site))


def _between(question: Question) -> str:
    """Of the names of a pair: a copy has a direction, a collective has none."""
    if "op" in question.settings:
        return " + "
    return " <-> " if question.settings.get("ways") == 2 else " -> "


def _why_missing(ran: Ran, limit_s: float) -> tuple[str, str]:
    if ran.code is None:
        still = "; it cannot even be killed, the driver holds it" if ran.alive else " and was killed"
        return faults.TIMED_OUT, f"not measured: the probe took more than {limit_s:.0f} s{still}"
    if ran.code != 0:
        return faults.PROBE_FAILED, f"not measured: the probe ended with status {ran.code}: {ran.last_words}"
    return faults.PROBE_FAILED, "not measured: the probe ended without an answer"
