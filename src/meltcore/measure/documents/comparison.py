"""Defines sets of fresh starts of one server under the same load, and the result of comparing two sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.files import read_document, write_document
from meltcore.measure.documents.schema import Fingerprint, RunResult, VersionedDocument
from meltcore.measure.documents.verdicts import Verdict

COMPARISON_FILE = "comparison.json"
SET_FILE = "set.json"

Better = Literal["higher", "lower"]


class ComparedMetric(msgspec.Struct, kw_only=True):
    """One metric on one load. `old` and `new` are means over starts.

    `change`, `low` and `high` are fractions: 0.05 is 5 %.

    `low` and `high` bound the change (bootstrap over starts, 95 %). `p` is the two-sided p-value of the Mann-Whitney
    test.
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
        """A text for tables that names the metric and its load."""
        return f"{self.metric}, {self.load}"


class Limits(msgspec.Struct, kw_only=True, frozen=True):
    """Limits of the verdict, as fractions of the old value.

    A change below `least_effect` is no regression and no improvement. The verdict NO EVIDENCE rules out a change of
    `must_find` or more. `alpha` is the significance level.
    """

    least_effect: float = 0.02
    must_find: float = 0.05
    alpha: float = 0.05


class Difference(msgspec.Struct, kw_only=True):
    """A property of the machine, the versions or the server in which the two sides differ."""

    name: str
    old: str
    new: str


class ComparisonResult(VersionedDocument, kw_only=True, tag_field="document", tag="comparison"):
    """The verdict on two sets of server starts, with all compared metrics.

    `order` says how the starts were interleaved. It is empty for stored sets. `noise` is the relative spread of the old
    server's starts. `control` compares the old server's starts before the comparison with its starts during the
    comparison. `doubts` are reasons against the comparison that the user overruled. `cautions` are reasons to read the
    verdict with care. `taken`, `fingerprint` and `load` belong to the new set.
    """

    verdict: Verdict
    reason: str
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
    primary: ComparedMetric
    control: ComparedMetric | None = None
    rows: list[ComparedMetric]
    differences: list[Difference] = msgspec.field(default_factory=list)
    doubts: list[str] = msgspec.field(default_factory=list)
    cautions: list[str] = msgspec.field(default_factory=list)


class StartSet(VersionedDocument, kw_only=True, tag_field="document", tag="baseline"):
    """The results of several `starts` of a server under the same load, in the order of the starts.

    `command` is the server's command line without secrets and folders. It is empty for a server that was running
    already.
    """

    name: str
    command: str
    taken: str
    load: dict[str, Any] = msgspec.field(default_factory=dict)
    starts: list[RunResult]


def write_start_set(folder: Path, start_set: StartSet) -> Path:
    """Write a set to `folder` and return the path of its file. The folder is created if it is missing."""
    return write_document(folder / SET_FILE, start_set)


def read_start_set(folder: Path | str) -> StartSet:
    """Return the set in a file or folder. Raises ConfigError as `read_document` does, and for a set without starts."""
    start_set = read_document(folder, StartSet, name=SET_FILE)
    if not start_set.starts:
        raise ConfigError(f"{folder} has no starts")
    return start_set


def is_start_set(path: Path) -> bool:
    """Return whether `path` is the file of a set, or a folder that contains a set."""
    return path.name == SET_FILE or (path / SET_FILE).is_file()
