"""What a load run is told: one dataclass, and the small languages of its command-line values."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from meltcore.errors import ConfigError

Arrivals = Literal["constant", "poisson"]

SLO_METRICS = ("ttft", "tpot", "itl", "e2e")
DEFAULT_WARMUP_CAP = 32  # requests; a whole wave of a high level would cost as much as the level

_Number = TypeVar("_Number", int, float)

_SPAN = re.compile(r"(\d+)(?:-(\d+))?")
_OPTION = re.compile(r"([a-z_]+)=(.+)")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """Seconds. `first_byte` counts from the sending, `idle` from the last byte, `total` from the intended start."""

    connect_s: float = 30.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    total_s: float = 1800.0


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """A run against one server: closed-loop levels (`concurrency`), or open-loop levels (`rates`, requests a second).

    `requests` is per level: one value for all, or one each. None: 20 a connection up to 200, at least one each (closed
    loop); 30 s of arrivals (open loop). `warmup` requests run before each level and stay out of its results; None:
    as many as the level's concurrency, at most 32.
    """

    url: str
    concurrency: tuple[int, ...] = (10,)
    rates: tuple[float, ...] = ()
    arrivals: Arrivals = "poisson"
    requests: int | tuple[int, ...] | None = None
    warmup: int | None = None
    workload: str = "problems:short"
    max_tokens: int | None = None  # output limit of prompts that name none; None: left to the server (problems: 512)
    model: str | None = None  # None: the first one that /v1/models names
    api_key: str | None = field(default=None, repr=False)
    seed: int = 0
    slo_ms: dict[str, float] = field(default_factory=dict)  # ttft, tpot, itl, e2e: limits of a good request
    processes: int = 1
    timeouts: Timeouts = Timeouts()
    stream: bool = True  # else whole answers, which have no TTFT and no ITL
    continuous_usage: bool = True  # ask for token counts with every chunk; some servers refuse the field
    temperature: float | None = 0.0  # None: left to the server
    extra_body: dict[str, Any] = field(default_factory=dict)
    may_be_empty: bool = False  # an answer of an end token and nothing else is whole
    keep_text: bool = False  # of every answer, in its record; else only of the sample that `tokenizer` re-counts
    tokenizer: str | None = None  # tokenizer.json, or a folder with one: re-counts a sample of answers
    records_path: Path | None = None  # requests.jsonl, appended to
    record_chunks: bool = False

    def __post_init__(self) -> None:
        _at_least("concurrency", min(self.concurrency, default=0), 1)
        _at_least("processes", self.processes, 1)
        if self.warmup is not None:
            _at_least("warmup", self.warmup, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
        for name, limit_s in asdict(self.timeouts).items():
            if not limit_s > 0:
                raise ConfigError(f"timeout: {name} must be more than 0 seconds; got {limit_s:g}")
        for rate in self.rates:
            if not 0 < rate < math.inf:
                raise ConfigError(f"rate must be more than 0 requests a second; got {rate}")
        if isinstance(self.requests, tuple) and len(self.requests) != len(self.levels):
            raise ConfigError(f"requests has {len(self.requests)} values for {len(self.levels)} levels")
        unknown = set(self.slo_ms) - set(SLO_METRICS)
        if unknown:
            raise ConfigError(f"slo: unknown {', '.join(sorted(unknown))}; there are {', '.join(SLO_METRICS)}")
        for name, limit_ms in self.slo_ms.items():
            if not limit_ms > 0:
                raise ConfigError(f"slo: {name} must be more than 0 ms; got {limit_ms:g}")
        for level in self.levels:
            _at_least("requests", level.requests, 1)

    @property
    def levels(self) -> list[Level]:
        """The levels in the order they run."""
        if self.rates:
            return [
                Level(concurrency=0, rate=rate, requests=self._requests(at, max(1, round(rate * 30))))
                for at, rate in enumerate(self.rates)
            ]
        return [
            Level(concurrency=count, rate=None, requests=self._requests(at, max(count, min(200, 20 * count))))
            for at, count in enumerate(self.concurrency)
        ]

    def warmup_of(self, level: Level) -> int:
        if self.warmup is not None:
            return self.warmup
        return min(level.concurrency or 8, level.requests, DEFAULT_WARMUP_CAP)

    def _requests(self, position: int, default: int) -> int:
        if isinstance(self.requests, tuple):
            return self.requests[position]
        return default if self.requests is None else self.requests


@dataclass(frozen=True, kw_only=True)
class Level:
    """One level: `concurrency` connections (closed loop), or `rate` arrivals a second (open loop, concurrency 0)."""

    concurrency: int
    rate: float | None
    requests: int

    @property
    def name(self) -> str:
        return f"concurrency {self.concurrency}" if self.rate is None else f"rate {self.rate:g}/s"

    @property
    def width(self) -> int:
        """Connections opened before the release: never more than there are requests. 0 for an open loop."""
        return min(self.concurrency, self.requests)


@dataclass(frozen=True)
class Span:
    """A whole number, fixed or uniform between two bounds, both included."""

    low: int
    high: int


def parse_span(text: str, what: str) -> Span:
    """`128` or `128-1024`. Raises ConfigError."""
    match = _SPAN.fullmatch(text)
    if match is None:
        raise ConfigError(f"{what}: {text!r} is neither a number nor a range such as 128-1024")
    span = Span(int(match[1]), int(match[2] or match[1]))
    if not 1 <= span.low <= span.high:
        raise ConfigError(f"{what}: {text} must start at 1 or more and not run backwards")
    return span


def parse_options(text: str, what: str, allowed: tuple[str, ...]) -> dict[str, str]:
    """`in=128,out=64` as a dict. Raises ConfigError for an unknown or repeated name."""
    options: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        match = _OPTION.fullmatch(part)
        if match is None or match[1] not in allowed:
            raise ConfigError(f"{what}: {part!r} is not one of {', '.join(f'{name}=...' for name in allowed)}")
        if match[1] in options:
            raise ConfigError(f"{what}: {match[1]} is given twice")
        options[match[1]] = match[2]
    return options


def parse_slo(text: str) -> dict[str, float]:
    """`ttft:2000,tpot:100` (milliseconds) as a dict. Raises ConfigError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        try:
            limits[name.strip()] = float(value)
        except ValueError as error:
            raise ConfigError(f"slo: {part!r} is not of the form ttft:2000 (milliseconds)") from error
    return limits


def parse_numbers(text: str, what: str, kind: type[_Number]) -> tuple[_Number, ...]:
    """`10,100` as numbers of `kind`. Raises ConfigError."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{what}: {text!r} is not a list of numbers such as 10,100") from error


def parse_extra_body(text: str) -> dict[str, Any]:
    """A JSON object. Raises ConfigError."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return fields


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigError(f"{name} must be at least {low}; got {value}")
