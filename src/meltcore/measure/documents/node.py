"""Defines the documents of a node: its snapshot, and its certificate.

A snapshot has facts, links and topology of the GPUs. A fact is a value, NOT_APPLICABLE or UNKNOWN. NOT_APPLICABLE means
that the GPU type is known to lack the feature. UNKNOWN means that a value which should be readable is not. UNKNOWN
never counts as zero.

A certificate has the measured values, the expected values and the findings, with one verdict. The verdict fails closed:
a value that is unreadable, zero, not finite, skipped or past its time limit is UNKNOWN and never PASS.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final, Literal

import msgspec

from meltcore.common.files import read_document
from meltcore.measure.documents.schema import Fingerprint, VersionedDocument
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, worst_verdict

UNKNOWN: Final = "UNKNOWN"
NOT_APPLICABLE: Final = "NOT_APPLICABLE"
Fact = int | float | str

NvLinkStatus = Literal["up", "down", "UNKNOWN"]
CERTIFICATE_FILE = "certificate.json"
CERTIFICATE_PAGE = "certificate.html"

Tier = Literal["quick", "standard", "full", "soak"]
TIERS: tuple[Tier, ...] = ("quick", "standard", "full", "soak")

Source = Literal["baseline", "prior", "topology"]


class NvLinkState(msgspec.Struct, kw_only=True):
    """One NVLink of a GPU.

    `speed_gbps` is in 10^9 bytes per second, one way. `peer` is "switch", a bus id, or UNKNOWN.
    """

    link: int
    state: NvLinkStatus
    speed_gbps: float | None = None
    peer: str = UNKNOWN


class GpuSnapshot(msgspec.Struct, kw_only=True):
    """One GPU or MIG device. `facts` has the keys of facts.py. `index` is the index of the GPU in nvidia-smi."""

    index: int
    name: str
    uuid: str
    mig: bool = False
    facts: dict[str, Fact]
    links: list[NvLinkState] = []

    @property
    def label(self) -> str:
        """A short name for tables, such as "GPU 3". The name of a MIG device has the beginning of its UUID."""
        return f"GPU {self.index}" + (f" {self.uuid[:12]}" if self.mig else "")

    def number(self, key: str) -> float | None:
        """Return a fact as a number, or None if it is absent or not a number."""
        value = self.facts.get(key)
        return None if isinstance(value, str) or value is None else float(value)

    def links_up(self) -> list[NvLinkState]:
        """The NVLinks of the GPU that are up."""
        return [link for link in self.links if link.state == "up"]


class Snapshot(VersionedDocument, kw_only=True, tag_field="document", tag="snapshot"):
    """The facts of a node and its GPUs.

    `topology[i][j]` is the path between GPUs i and j in nvidia-smi's terms (NV18, PIX, NODE, SYS, ...).
    """

    fingerprint: Fingerprint
    driver: str = UNKNOWN
    cuda_driver: str = UNKNOWN
    libraries: dict[str, str] = msgspec.field(default_factory=dict)
    gpus: list[GpuSnapshot] = msgspec.field(default_factory=list)
    topology: list[list[str]] = msgspec.field(default_factory=list)
    notes: list[str] = msgspec.field(default_factory=list)


class Expectation(msgspec.Struct, kw_only=True, frozen=True):
    """The `value` of a healthy GPU, the minimum that passes (`floor`), and the `basis` of the two numbers."""

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
    """The state of one GPU during a check.

    `clock_reasons` has the fraction of the samples for each clock event reason. `slow_driver` says how long the driver
    took to answer about the GPU if that was too long, else "".
    """

    subject: str
    samples: int
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_temperature_c: float | None = None
    pcie_generation: float | None = None
    pcie_width: float | None = None
    clock_reasons: dict[str, float] = {}
    new_errors: dict[str, int] = {}
    unreadable: list[str] = []
    slow_driver: str = ""


class CheckReport(msgspec.Struct, kw_only=True):
    """The rows and findings of one check.

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

    `findings` has the findings of all checks, one per fault code and subject, the worst first. `unverified` lists what
    was not verified: rows that are UNKNOWN or INVALID, and features that the machine lacks. `evidence` has the SHA-256
    of each file of the run folder.
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
    evidence: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The exit status of `meltcore certify`."""
        return MEANINGS[self.verdict].exit_code


def overall(checks: Iterable[CheckReport], required: Iterable[str]) -> CheckVerdict:
    """Return PASS only if every required check passed or does not apply, and at least one passed.

    Of a check that is not required, WARN and FAIL count. What it could not read does not.
    """
    required = set(required)
    verdict_by_check = {
        check.name: check.verdict
        for check in checks
        if check.name in required or check.verdict in ("PASS", "WARN", "FAIL")
    }
    missing_verdicts: list[CheckVerdict] = ["UNKNOWN" for name in required if name not in verdict_by_check]
    verdict = worst_verdict([*verdict_by_check.values(), *missing_verdicts], "UNKNOWN")
    return verdict if verdict in ("FAIL", "WARN", "PASS") else "UNKNOWN"


def read_certificate(path: Path | str) -> Certificate:
    """Return the certificate in a file or a run folder. Raises ConfigError as `read_document` does."""
    return read_document(path, Certificate, name=CERTIFICATE_FILE)
