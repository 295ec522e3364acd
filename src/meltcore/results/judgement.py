"""What a comparison of two sets of starts found: one verdict from one metric, and every other metric beside it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from meltcore.results.schema import Fingerprint

JUDGEMENT_VERSION = 1
JUDGEMENT_FILE = "judgement.json"

JudgementWord = Literal["REGRESSION", "IMPROVEMENT", "NO EVIDENCE", "UNDERPOWERED"]
Better = Literal["higher", "lower"]


class JudgedRow(msgspec.Struct, kw_only=True):
    """One metric on one load. `old` and `new` are means over starts; shares such as `change` are 0.05 for 5 %.

    `low` and `high` bound the change (bootstrap over starts, 95 %); `p` is Mann-Whitney's, two-sided.
    """

    load: str
    metric: str
    better: Better
    old_values: list[float]
    new_values: list[float]
    old: float
    new: float
    change: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None

    @property
    def name(self) -> str:
        return f"{self.metric}, {self.load}"


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """Shares. Changes below `least_effect` get no verdict; `must_find` is what NO EVIDENCE has to rule out."""

    least_effect: float = 0.02
    must_find: float = 0.05
    alpha: float = 0.05


class Difference(msgspec.Struct, kw_only=True):
    """A fact of machine, versions or server that is not the same on both sides."""

    name: str
    old: str
    new: str


class Judgement(msgspec.Struct, kw_only=True):
    """`order` says how the starts were interleaved, empty for stored sets. `noise` is A's own, a share.

    `control` is A against A: the starts of A before the comparison, and those within it. `doubts` are reasons not to
    compare that were overruled; `cautions` are reasons to read the verdict with care. `taken`, `fingerprint` and `load`
    are those of the new set: when, on what, and what each of its starts was loaded with.
    """

    judgement_version: int = JUDGEMENT_VERSION
    verdict: JudgementWord
    why: str
    old_name: str
    new_name: str
    old_command: str = ""
    new_command: str = ""
    taken: str = ""
    fingerprint: Fingerprint | None = None
    load: dict[str, Any] = msgspec.field(default_factory=dict)
    order: str = ""
    noise: float | None = None
    limits: Limits = Limits()
    primary: JudgedRow
    control: JudgedRow | None = None
    rows: list[JudgedRow]
    differences: list[Difference] = msgspec.field(default_factory=list)
    doubts: list[str] = msgspec.field(default_factory=list)
    cautions: list[str] = msgspec.field(default_factory=list)

    @property
    def interleaved(self) -> bool:
        return bool(self.order)
