"""A node's certificate: what was measured, what was expected, what was found, and one verdict.

It fails closed: whatever is unreadable, zero, not finite, skipped or cut off by time is UNKNOWN and never PASS.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec

from meltcore.errors import ConfigError
from meltcore.results.snapshot import Snapshot

CERTIFICATE_SCHEMA_VERSION = 1
CERTIFICATE_FILE = "certificate.json"

Tier = Literal["quick", "standard", "full", "soak"]
TIERS: tuple[Tier, ...] = ("quick", "standard", "full", "soak")

# Of a whole certificate, with the exit codes that Nagios and its kin expect of a plugin.
Verdict = Literal["PASS", "WARN", "FAIL", "UNKNOWN"]
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "WARN": 1, "FAIL": 2, "UNKNOWN": 3}

# Of one row. INVALID: measured beside another program, so it says nothing. NOT_APPLICABLE: this machine has no such
# thing. RECORDED: a sound number for which no expectation exists, such as the time of a small collective.
RowVerdict = Literal["PASS", "WARN", "FAIL", "UNKNOWN", "INVALID", "NOT_APPLICABLE", "RECORDED"]

Source = Literal["baseline", "prior", "topology"]


class Expectation(msgspec.Struct, kw_only=True, frozen=True):
    """What a healthy GPU gives (`value`), the least that passes (`floor`), and where that is from (`why`)."""

    source: Source
    value: float
    floor: float
    why: str


class Row(msgspec.Struct, kw_only=True):
    """One figure of one subject ("GPU 3", "GPU 0 -> GPU 5", "8 GPUs"). `gpus` are positions in the snapshot.

    `measured` is the median of `samples`. `floor` is the strictest of `expectations`, set by `floor_set_by`; `share` is
    measured / expected of that one. None means that there is none.
    """

    key: str
    subject: str
    gpus: list[int]
    unit: str
    verdict: RowVerdict
    measured: float | None = None
    expected: float | None = None
    floor: float | None = None
    floor_set_by: Source | None = None
    share: float | None = None
    expectations: list[Expectation] = []
    samples: list[float] = []
    note: str = ""


class Finding(msgspec.Struct, kw_only=True):
    """Something to know or to act on. `code` is stable (hardware/faults.py), for scripts."""

    code: str
    verdict: RowVerdict
    check: str
    subject: str
    message: str
    action: str


class Conditions(msgspec.Struct, kw_only=True):
    """One GPU while a check ran. `reasons`: clock reasons, each with the share of the samples that gave it."""

    subject: str
    samples: int
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    pcie_generation: float | None = None
    reasons: dict[str, float] = {}
    new_errors: dict[str, int] = {}
    unreadable: list[str] = []


class CheckReport(msgspec.Struct, kw_only=True):
    """One check's rows and findings. `why`: in words, where the check could not be run to its end or does not apply."""

    name: str
    title: str
    verdict: RowVerdict
    rows: list[Row] = []
    findings: list[Finding] = []
    conditions: list[Conditions] = []
    duration_s: float = 0.0
    why: str = ""


class Certificate(msgspec.Struct, kw_only=True):
    """`findings`: those of all checks, the same fault of the same GPU told once, the gravest first.

    `unseen` names what was not seen: rows that are UNKNOWN or INVALID, and what the machine does not have.
    """

    schema_version: int = CERTIFICATE_SCHEMA_VERSION
    command: str = "certify"
    tier: Tier
    verdict: Verdict
    required: list[str]
    started: str
    duration_s: float
    snapshot: Snapshot
    checks: list[CheckReport]
    findings: list[Finding] = []
    unseen: list[str] = []
    notes: list[str] = []

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


def worst(verdicts: Iterable[RowVerdict]) -> RowVerdict:
    """Of one check. FAIL, then what could not be judged, then WARN; neutral ones count only where nothing else is."""
    present = set(verdicts)
    for verdict in _ORDER:
        if verdict in present:
            return verdict
    return "UNKNOWN"


_ORDER: tuple[RowVerdict, ...] = ("FAIL", "UNKNOWN", "INVALID", "WARN", "PASS", "RECORDED", "NOT_APPLICABLE")


def overall(checks: Iterable[CheckReport], required: Iterable[str]) -> Verdict:
    """PASS only where every required check is there and either passed or does not apply, and at least one passed."""
    found = {check.name: check.verdict for check in checks}
    verdicts = list(found.values())
    if any(name not in found for name in required):
        verdicts.append("UNKNOWN")
    verdict = worst(verdicts)
    if verdict == "FAIL" or verdict == "WARN" or verdict == "PASS":
        return verdict
    return "UNKNOWN"


def read_certificate(path: Path | str) -> Certificate:
    """Of a file, or of the run folder it lies in.

    Raises ConfigError for a file that cannot be read, is no certificate, or is of another schema version.
    """
    path = Path(path)
    path = path / CERTIFICATE_FILE if path.is_dir() else path
    try:
        certificate = msgspec.json.decode(Path(path).read_bytes(), type=Certificate)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no certificate of meltcore certify: {error}") from error
    if certificate.schema_version != CERTIFICATE_SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has certificate schema version {certificate.schema_version}; this meltcore reads version "
            f"{CERTIFICATE_SCHEMA_VERSION}"
        )
    return certificate
