"""What a node is at one moment: its GPUs' facts, links and topology. `meltcore snapshot` writes it.

A fact is a value, NOT_APPLICABLE (the driver says "not supported", and the product is known to have no such thing) or
UNKNOWN (it should be readable and is not). UNKNOWN is never taken for zero.
"""

from pathlib import Path
from typing import Final, Literal

import msgspec

from meltcore.errors import ConfigError
from meltcore.results.schema import Fingerprint

SNAPSHOT_SCHEMA_VERSION = 1

UNKNOWN: Final = "UNKNOWN"
NOT_APPLICABLE: Final = "NOT_APPLICABLE"
Fact = int | float | str

LinkPower = Literal["up", "down", "UNKNOWN"]


class LinkState(msgspec.Struct, kw_only=True):
    """One NVLink of a GPU. `speed_gbps`: 10^9 bytes a second one way; `peer`: "switch", a GPU's bus id, or UNKNOWN."""

    link: int
    state: LinkPower
    speed_gbps: float | None = None
    peer: str = UNKNOWN


class GpuState(msgspec.Struct, kw_only=True):
    """One GPU, or one MIG slice. `facts` by the keys of hardware/facts.py; `index` as nvidia-smi numbers boards."""

    index: int
    name: str
    uuid: str
    mig: bool = False
    facts: dict[str, Fact]
    links: list[LinkState] = []

    @property
    def label(self) -> str:
        return f"GPU {self.index}" + (f" {self.uuid[:12]}" if self.mig else "")

    def number(self, key: str) -> float | None:
        """A fact as a number; None where it is absent or no number."""
        value = self.facts.get(key)
        return None if isinstance(value, str) or value is None else float(value)

    def links_up(self) -> list[LinkState]:
        return [link for link in self.links if link.state == "up"]


class Snapshot(msgspec.Struct, kw_only=True):
    """`topology[i][j]`: the path between GPUs i and j, in nvidia-smi's words (NV18, PIX, NODE, SYS, ...)."""

    schema_version: int = SNAPSHOT_SCHEMA_VERSION
    fingerprint: Fingerprint
    driver: str = UNKNOWN
    cuda_driver: str = UNKNOWN
    libraries: dict[str, str] = {}
    gpus: list[GpuState] = []
    topology: list[list[str]] = []
    notes: list[str] = []


def read_snapshot(path: Path | str) -> Snapshot:
    """Raises ConfigError for a file that cannot be read, is no snapshot, or is of another schema version."""
    try:
        snapshot = msgspec.json.decode(Path(path).read_bytes(), type=Snapshot)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no snapshot of meltcore snapshot --json: {error}") from error
    if snapshot.schema_version != SNAPSHOT_SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has snapshot schema version {snapshot.schema_version}; this meltcore reads version "
            f"{SNAPSHOT_SCHEMA_VERSION}"
        )
    return snapshot
