"""A node's certificate: what was measured, what was expected, what was found, and one verdict.

The verdict fails closed: a value that is unreadable, zero, not finite, skipped or past its time limit is UNKNOWN and
never PASS.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from meltcore.common.files import read_document
from meltcore.measure.documents.schema import VersionedDocument
from meltcore.measure.documents.snapshot import Snapshot
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, worst_verdict

CERTIFICATE_FILE = "certificate.json"
CERTIFICATE_PAGE = "certificate.html"

Tier = Literal["quick", "standard", "full", "soak"]
TIERS: tuple[Tier, ...] = ("quick", "standard", "full", "soak")

Source = Literal["baseline", "prior", "topology"]


class Expectation(msgspec.Struct, kw_only=True, frozen=True):
    """What a healthy GPU reaches (`value`), the minimum that passes (`floor`), and how both were derived (`basis`)."""

    source: Source
    value: float
    floor: float
    basis: str


class CertificateRow(msgspec.Struct, kw_only=True):
    """One metric of one subject ("GPU 3", "GPU 0 -> GPU 5", "8 GPUs"). `gpus` are positions in the snapshot.

    `measured` is the median of `samples`. `floor` is the highest floor of `expectations`, and `floor_set_by` names its
    expectation. `ratio` is `measured` divided by the value of that expectation. A value that does not exist is None.
    """

    key: str
    subject: str
    gpus: list[int]
    unit: str
    verdict: CheckVerdict
    measured: float | None = None
    expected: float | None = None
    floor: float | None = None
    floor_set_by: Source | None = None
    ratio: float | None = None
    expectations: list[Expectation] = []
    samples: list[float] = []
    note: str = ""


class Finding(msgspec.Struct, kw_only=True):
    """A fault or a gap, with the action to take. `code` is stable (faults.py), for scripts."""

    code: str
    verdict: CheckVerdict
    check: str
    subject: str
    message: str
    action: str


class Conditions(msgspec.Struct, kw_only=True):
    """One GPU during a check. `clock_reasons` holds clock event reasons, each with its fraction of the samples."""

    subject: str
    samples: int
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    pcie_generation: float | None = None
    clock_reasons: dict[str, float] = {}
    new_errors: dict[str, int] = {}
    unreadable: list[str] = []


class CheckReport(msgspec.Struct, kw_only=True):
    """Rows and findings of one check.

    `reason` says why the check did not finish, why it does not apply, or what it leaves out.
    """

    name: str
    title: str
    verdict: CheckVerdict
    rows: list[CertificateRow] = []
    findings: list[Finding] = []
    conditions: list[Conditions] = []
    duration_s: float = 0.0
    reason: str = ""


class Certificate(VersionedDocument, kw_only=True, tag_field="document", tag="certificate"):
    """The result of `meltcore certify`.

    `findings` has what all checks found, one finding per fault code and subject, the worst first. `unverified` lists
    what was not verified: rows that are UNKNOWN or INVALID, and features that the machine lacks.
    """

    command: str = "certify"
    tier: Tier
    verdict: CheckVerdict
    required: list[str]
    started: str
    duration_s: float
    snapshot: Snapshot
    checks: list[CheckReport]
    findings: list[Finding] = msgspec.field(default_factory=list)
    unverified: list[str] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """Exit status of `meltcore certify`."""
        return MEANINGS[self.verdict].exit_code


def overall(checks: Iterable[CheckReport], required: Iterable[str]) -> CheckVerdict:
    """Return PASS only where every required check passed or does not apply, and at least one passed."""
    verdict_by_check = {check.name: check.verdict for check in checks}
    missing_verdicts: list[CheckVerdict] = ["UNKNOWN" for name in required if name not in verdict_by_check]
    verdict = worst_verdict([*verdict_by_check.values(), *missing_verdicts], "UNKNOWN")
    return verdict if verdict in ("FAIL", "WARN", "PASS") else "UNKNOWN"


def read_certificate(path: Path | str) -> Certificate:
    """Read a certificate from a file or a run folder. Raises ConfigError as `read_document` does."""
    return read_document(path, Certificate, name=CERTIFICATE_FILE)
