"""Defines the snapshot of a node that `meltcore snapshot` writes: facts, links and topology of its GPUs.

A fact is a value, NOT_APPLICABLE (the driver reports "not supported", and the GPU type is known to lack the feature) or
UNKNOWN (it should be readable and is not). UNKNOWN never counts as zero.
"""

from typing import Final, Literal

import msgspec

from meltcore.measure.documents.schema import Fingerprint, VersionedDocument

UNKNOWN: Final = "UNKNOWN"
NOT_APPLICABLE: Final = "NOT_APPLICABLE"
Fact = int | float | str

NvLinkStatus = Literal["up", "down", "UNKNOWN"]


class NvLinkState(msgspec.Struct, kw_only=True):
    """One NVLink of a GPU.

    `speed_gbps` is in 10^9 bytes per second, one way. `peer` is "switch", a bus id, or UNKNOWN.
    """

    link: int
    state: NvLinkStatus
    speed_gbps: float | None = None
    peer: str = UNKNOWN


class GpuSnapshot(msgspec.Struct, kw_only=True):
    """One GPU, or one MIG device. `facts` has the keys of facts.py; `index` is nvidia-smi's."""

    index: int
    name: str
    uuid: str
    mig: bool = False
    facts: dict[str, Fact]
    links: list[NvLinkState] = []

    @property
    def label(self) -> str:
        """A short name for tables: "GPU 3", or with the start of its UUID for a MIG device."""
        return f"GPU {self.index}" + (f" {self.uuid[:12]}" if self.mig else "")

    def number(self, key: str) -> float | None:
        """Return a fact as a number, or None if it is absent or not a number."""
        value = self.facts.get(key)
        return None if isinstance(value, str) or value is None else float(value)

    def links_up(self) -> list[NvLinkState]:
        """Return the NVLinks that are up."""
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
