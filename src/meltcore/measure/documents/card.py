"""Defines the report card of a node: all evidence, one verdict, and the settings that made a server faster."""

from __future__ import annotations

from typing import Literal

import msgspec

from meltcore.measure.documents.comparison import ComparisonResult
from meltcore.measure.documents.gaps import GpuProfile
from meltcore.measure.documents.node import Certificate, Snapshot
from meltcore.measure.documents.schema import RunResult, VersionedDocument
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.tuning import Tuning
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, Verdict

CARD_FILE, CARD_PAGE = "card.json", "card.html"

EvidenceType = Literal["snapshot", "certificate", "benchmark", "evaluation", "tuning", "profile", "comparison", "load"]
# The command that makes each type of evidence.
COMMANDS: dict[EvidenceType, str] = {
    "snapshot": "meltcore snapshot --json",
    "certificate": "meltcore certify",
    "benchmark": "meltcore bench",
    "evaluation": "meltcore eval",
    "tuning": "meltcore tune",
    "profile": "meltcore profile",
    "comparison": "meltcore compare --run",
    "load": "meltcore load",
}
# What a card requires by default: an evaluation stands for the load on a server.
REQUIRED: tuple[EvidenceType, ...] = tuple(name for name in COMMANDS if name != "load")


class Evidence(msgspec.Struct, kw_only=True):
    """One document of the card. `summary` is its result in one sentence; `reasons` say why the result is not a PASS.

    `source` is the name of the document's folder or file. `taken` is an ISO time, or empty if the document has no time.
    """

    type: EvidenceType
    verdict: CheckVerdict
    summary: str
    source: str
    taken: str = ""
    reasons: list[str] = msgspec.field(default_factory=list)


class Story(msgspec.Struct, kw_only=True):
    """A changed setting of a server, with the gain that a tuning (`tuned`) and a comparison (`compared`) measured.

    `change` is the setting as arguments of the server, and `workload` is the workload of the measurements. `tuning` and
    `comparison` are indices into the card's lists `tunings` and `comparisons`.
    """

    change: str
    workload: str
    state: Verdict
    tuned: str = ""
    compared: str = ""
    tuning: int | None = None
    comparison: int | None = None


class Card(VersionedDocument, kw_only=True, tag_field="document", tag="card"):
    """All evidence about a node, and one verdict.

    `verdict` is the worst verdict of the evidence. If required types of evidence are `missing`, it is INCOMPLETE or
    worse. `superseded` names documents that a newer document of the same subject replaces. `doubts` say why the
    documents may describe different machines. The card contains whole documents, so it can be rendered without other
    files.
    """

    verdict: CheckVerdict
    reason: str
    taken: str
    machine: str
    evidence: list[Evidence]
    missing: list[EvidenceType]
    required: list[EvidenceType] = msgspec.field(default_factory=list)
    superseded: list[str] = msgspec.field(default_factory=list)
    doubts: list[str] = msgspec.field(default_factory=list)
    stories: list[Story] = msgspec.field(default_factory=list)
    snapshot: Snapshot | None = None
    certificate: Certificate | None = None
    benchmark: ScoredRun | None = None
    runs: list[RunResult] = msgspec.field(default_factory=list)
    tunings: list[Tuning] = msgspec.field(default_factory=list)
    profiles: list[GpuProfile] = msgspec.field(default_factory=list)
    comparisons: list[ComparisonResult] = msgspec.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """The exit status of `meltcore report`."""
        return MEANINGS[self.verdict].exit_code
