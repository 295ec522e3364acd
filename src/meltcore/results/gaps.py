"""Where a GPU was not computing, and why: what `meltcore profile` finds in a trace. Times in microseconds."""

from __future__ import annotations

from typing import Literal

import msgspec

from meltcore.results.schema import Fingerprint

GAPS_VERSION = 1
GAPS_FILE = "gaps.json"
GAPS_PAGE = "gaps.html"

Cause = Literal[
    "host late", "synchronisation", "copy", "collective wait", "no work", "host silent", "queued", "unknown"
]

CAUSES: dict[Cause, str] = {
    "host late": "the next kernel was launched after the GPU had gone idle, and the host was busy until then",
    "synchronisation": "the host waited for the GPU before it launched the next kernel",
    "copy": "nothing but copies ran",
    "collective wait": "nothing but collectives ran",
    "no work": "the launching thread sat in a recorded wait: for requests, a lock or a message",
    "host silent": "the launching thread recorded nothing: it waited, or ran Python that the trace does not hold",
    "queued": "launched in time: the GPU's own time between kernels, or a wait for another stream",
    "unknown": "the trace does not hold the launch of the next kernel",
}
# Groups of a step's budget that are no computing: their own time stands among the causes too.
COLLECTIVES, COPIES = "collectives", "copies"
NOT_COMPUTING = (COLLECTIVES, COPIES)
SIZES: tuple[tuple[str, float], ...] = (
    ("below 10 us", 10.0),
    ("10 to 100 us", 100.0),
    ("0.1 to 1 ms", 1000.0),
    ("1 ms and more", float("inf")),
)


class Part(msgspec.Struct, kw_only=True):
    """A share of the window: `count` stretches, `total_us` together."""

    name: str
    count: int
    total_us: float


class Pair(msgspec.Struct, kw_only=True):
    """Gaps between one kernel and the next, all of the same two names."""

    before: str
    after: str
    count: int
    total_us: float
    median_us: float
    cause: Cause


class BudgetRow(msgspec.Struct, kw_only=True):
    """A group of kernels over the window: `count` of them, the time that is theirs, and the idle time in front of them.

    Over all rows, `ran_us` and `before_us` add up to the window. A moment in which several kernels ran is that of the
    one which began first; collectives and copies have only what they ran alone.
    """

    name: str
    count: int
    ran_us: float
    before_us: float


class GapReport(msgspec.Struct, kw_only=True):
    """One GPU over `window_us`. `computing_us`: at least one kernel other than a collective ran, on any stream.

    `recoverable_share` is an upper bound of what could be won: all time not computing, less that without work.
    `untrusted` says why the trace may hold less than the GPU did; empty where nothing speaks against it. `steps` of the
    window, by what is counted for one (`steps_by`); None where nothing marks them.
    """

    device: int
    window_us: float
    computing_us: float
    busy_us: float
    kernels: int
    streams: int
    by_cause: list[Part]
    by_size: list[Part]
    pairs: list[Pair]
    recoverable_share: float
    graph_launches: int = 0
    graph_kernels: int = 0
    budget: list[BudgetRow] = msgspec.field(default_factory=list)
    steps: int | None = None
    steps_by: str = ""
    untrusted: list[str] = msgspec.field(default_factory=list)


class Profile(msgspec.Struct, kw_only=True):
    """A whole `gaps.json`: a report a GPU. `source` is the trace's name; `taken` is when it was read.

    `fingerprint` is None for a trace that was recorded elsewhere or some other time: it does not say on what.
    """

    gaps_version: int = GAPS_VERSION
    source: str
    taken: str
    fingerprint: Fingerprint | None = None
    reports: list[GapReport]
