"""Defines the record of one submission: its checks, the runs that it was made from, and the files in its folder."""

from __future__ import annotations

from typing import Any

import msgspec

from meltcore.measure.documents.schema import CheckResult, VersionedDocument
from meltcore.measure.documents.verdicts import Verdict

SUBMISSION_FILE = "submission.json"


class Submission(VersionedDocument, kw_only=True, tag_field="document", tag="submission"):
    """One call of `meltcore submit`.

    A refused submission has no results and no files. Its `gates` say why it was refused. `settings` holds, by run
    folder, what the server reported about itself. `public_score` is the score of the two result files by the public
    harness's formula. `files` maps each file to its SHA-256.
    """

    taken: str
    meltcore: str
    rules: str
    verdict: Verdict
    gates: list[CheckResult] = msgspec.field(default_factory=list)
    settings: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    public_score: float | None = None
    files: dict[str, str] = msgspec.field(default_factory=dict)
