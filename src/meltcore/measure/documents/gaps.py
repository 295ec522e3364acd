"""Defines the result of `meltcore profile`: the gaps in which a GPU did not compute, and their causes.

Times are in microseconds.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from meltcore.measure.documents.schema import Fingerprint, VersionedDocument

GAPS_FILE = "gaps.json"
GAPS_PAGE = "gaps.html"

Cause = Literal[
    "late launch",
    "synchronization",
    "exposed copy",
    "exposed communication",
    "no work",
    "untraced host",
    "kernel wait",
    "unknown",
]

CAUSES: dict[Cause, str] = {
    "late launch": "the host was busy and launched the next kernel after the GPU had gone idle",
    "synchronization": "the host waited for the GPU before it launched the next kernel",
    "exposed copy": "only copies ran",
    "exposed communication": "only collectives ran",
    "no work": "the launching thread waited for requests, a lock or a message",
    "untraced host": "the trace holds nothing of the launching thread: it waited, or ran untraced Python",
    "kernel wait": "launched in time: the GPU's own time between kernels, or a wait for another stream",
    "unknown": "the trace lacks the launch of the next kernel",
}
# Groups of a time budget that do not compute. Time in which only they run is a cause of gaps too.
COLLECTIVES, COPIES = "collectives", "copies"
NOT_COMPUTING = (COLLECTIVES, COPIES)
SIZES: tuple[tuple[str, float], ...] = (
    ("below 10 us", 10.0),
    ("10 to 100 us", 100.0),
    ("0.1 to 1 ms", 1000.0),
    ("1 ms and more", float("inf")),
)


class GapTotal(msgspec.Struct, kw_only=True):
    """The number and the total length of the gaps that have one cause or one size class."""

    name: str
    count: int
    total_us: float


class KernelPair(msgspec.Struct, kw_only=True):
    """The gaps between two successive kernels, summed over all pairs with the same two names."""

    before: str
    after: str
    count: int
    total_us: float
    median_us: float
    cause: Cause


class BudgetRow(msgspec.Struct, kw_only=True):
    """A group of kernels in the window: the number of kernels, their time, and the idle time before the kernels.

    Over all rows, `ran_us` and `idle_before_us` add up to the window. If kernels overlap, the time belongs to the
    kernel that began first. For collectives and copies, only the time without a concurrent kernel counts.
    """

    name: str
    count: int
    ran_us: float
    idle_before_us: float


class GapReport(msgspec.Struct, kw_only=True):
    """The idle time of one GPU in a window of `window_us`.

    `computing_us` is the time in which at least one kernel other than a collective ran, on any stream.
    `recoverable_share` is an upper bound of the possible gain: the time without computation, except for the cause "no
    work". `untrusted` holds reasons why the trace may be incomplete. `steps` is the number of kernels or ranges named
    `step_marker`. It is None if the trace has no step markers.
    """

    device: int
    window_us: float
    computing_us: float
    busy_us: float
    kernels: int
    streams: int
    by_cause: list[GapTotal]
    by_size: list[GapTotal]
    pairs: list[KernelPair]
    recoverable_share: float
    graph_launches: int = 0
    graph_kernels: int = 0
    budget: list[BudgetRow] = msgspec.field(default_factory=list)
    steps: int | None = None
    step_marker: str = ""
    untrusted: list[str] = msgspec.field(default_factory=list)


class GpuProfile(VersionedDocument, kw_only=True, tag_field="document", tag="profile"):
    """The content of a `gaps.json`: one report per GPU.

    `source` is the file name of the trace, `taken` the time at which it was read. `fingerprint` is None for a trace
    from a file, which does not say on which machine it was recorded.
    """

    source: str
    taken: str
    fingerprint: Fingerprint | None = None
    reports: list[GapReport]
