"""A node's report card: all that was found out about it, side by side, with one verdict and the perf stories."""

from __future__ import annotations

from typing import Literal

import msgspec

from meltcore.results.certificate import EXIT_CODES, Certificate, Verdict
from meltcore.results.gaps import Profile
from meltcore.results.judgement import Judgement
from meltcore.results.schema import RunResult
from meltcore.results.score import ScoredRun
from meltcore.results.snapshot import Snapshot
from meltcore.results.tuning import Tuning

CARD_VERSION = 1
CARD_FILE, CARD_PAGE = "card.json", "card.html"

PartKind = Literal["snapshot", "certificate", "benchmark", "evaluation", "tuning", "profile", "comparison", "load"]
# What a whole card holds, and the command that makes each; a run of `meltcore load` is shown where there is one.
MADE_BY: dict[PartKind, str] = {
    "snapshot": "meltcore snapshot --json",
    "certificate": "meltcore certify",
    "benchmark": "meltcore bench",
    "evaluation": "meltcore eval",
    "tuning": "meltcore tune",
    "profile": "meltcore profile",
    "comparison": "meltcore compare --run",
}

# RECORDED: something to look up that nothing is judged by, such as a snapshot.
PartVerdict = Literal["PASS", "WARN", "FAIL", "UNKNOWN", "RECORDED"]
StoryState = Literal["CONFIRMED", "NOT CONFIRMED", "CONTRADICTED"]


class Part(msgspec.Struct, kw_only=True):
    """One document of the card. `line` says in a sentence what it found, `reasons` why it is not a PASS.

    `source` is the name of its folder or file; `taken` an ISO time, empty where the document does not tell.
    """

    kind: PartKind
    verdict: PartVerdict
    line: str
    source: str
    taken: str = ""
    reasons: list[str] = msgspec.field(default_factory=list)


class Story(msgspec.Struct, kw_only=True):
    """One setting that was changed: what it gave by one start each (`tuned`), and by a comparison (`judged`).

    `change` is the setting in the server's words, `workload` what it was measured on. `tuning` and `comparison` are
    places in the card's lists.
    """

    change: str
    workload: str
    state: StoryState
    tuned: str = ""
    judged: str = ""
    tuning: int | None = None
    comparison: int | None = None


class Card(msgspec.Struct, kw_only=True):
    """`verdict` is the gravest of the parts; `missing` are kinds that are not there, and so neither passed nor failed.

    `earlier` names documents that a newer one of the same kind stands for; `doubts` say why these may not be of one
    machine. The documents themselves follow whole, so the card can be drawn again from this alone.
    """

    card_version: int = CARD_VERSION
    verdict: Verdict
    why: str
    taken: str
    machine: str
    parts: list[Part]
    missing: list[PartKind]
    earlier: list[str] = msgspec.field(default_factory=list)
    doubts: list[str] = msgspec.field(default_factory=list)
    stories: list[Story] = msgspec.field(default_factory=list)
    snapshot: Snapshot | None = None
    certificate: Certificate | None = None
    benchmark: ScoredRun | None = None
    runs: list[RunResult] = msgspec.field(default_factory=list)
    tunings: list[Tuning] = msgspec.field(default_factory=list)
    profiles: list[Profile] = msgspec.field(default_factory=list)
    comparisons: list[Judgement] = msgspec.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]
