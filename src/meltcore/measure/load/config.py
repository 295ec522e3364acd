"""Defines the settings of a load run, and parses the values of its command-line options."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from meltcore.common.errors import ConfigError
from meltcore.common.options import option, read_number

ArrivalProcess = Literal["poisson", "constant"]

# Above all control ids and below the vocabulary of any published model; a server refuses an id that it does not have.
RANDOM_LOW_ID, RANDOM_HIGH_ID = 100, 30_000
DEFAULT_SEND_S = 10.0  # of a level that has no number of requests: a shorter one is mostly ramp and drain
MAX_REQUESTS = 10_000_000  # of a level that sends for a time, which ends it long before
NUM_PROBLEMS = 2_000  # different ones of a graded workload; others make each prompt by its index
DEFAULT_MAX_WARMUPS = 32  # a warm-up as wide as a level of high concurrency would cost as much as the level

_Number = TypeVar("_Number", int, float)

_RANGE_PATTERN = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_FOLDER_PATTERN = re.compile(r"=[^,]*/")
_FIELD_PATTERN = re.compile(r"([a-z_]+)=(.+)")


class Timeouts(NamedTuple):
    """Holds the time limits of a request in seconds.

    `first_byte_s` counts from the time the request is sent, `idle_s` from the last received byte, and `total_s` from
    the intended start.
    """

    connect_s: float = 30.0
    first_byte_s: float = 600.0
    idle_s: float = 300.0
    total_s: float = 1800.0


class AnswerRules(NamedTuple):
    """Holds the conditions, beyond a finish reason, that make an answer complete.

    With `needs_text` an answer without text is a failure, even if the server counted tokens. With `allow_empty` an
    answer of only an end token is complete, although it has no text. With `needs_usage` an answer without the server's
    token counts is a failure.
    """

    needs_text: bool = False
    allow_empty: bool = False
    needs_usage: bool = False


def published_workload(spec: str) -> str:
    """Return the workload description `spec` for results: without the folders of the files that it names."""
    kind, separator, options_text = spec.partition(":")
    if "/" in kind or "=" not in options_text:
        return spec.rpartition("/")[2]
    return f"{kind}{separator}{_FOLDER_PATTERN.sub('=', options_text)}"


def parse_slo(text: str) -> dict[str, float]:
    """Parse latency limits such as `ttft:2000,tpot:100` into milliseconds by metric.

    Raises ConfigError for other text.
    """
    slo_ms: dict[str, float] = {}
    for limit_text in text.split(","):
        name, _, value = limit_text.partition(":")
        try:
            slo_ms[name.strip()] = read_number(value, float)
        except ValueError as error:
            raise ConfigError(f"--goodput: {limit_text!r} is not of the form ttft:2000 (milliseconds)") from error
    return slo_ms


def parse_extra_body(text: str) -> dict[str, Any]:
    """Parse a JSON object from the command line. Raises ConfigError for any other text."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError("--extra-body must be a JSON object")
    return fields


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Describes a run against one server, with closed-loop levels (`concurrency`) or open-loop levels (`request_rate`).

    `num_prompts` has one value for all levels or one value per level. If it is empty, a closed-loop level sends for
    DEFAULT_SEND_S, at least one request per connection, and an open-loop level for 30 s. `num_warmups` requests run
    before each level and do not count. A `num_warmups` of None uses the level's concurrency, at most 32.
    """

    url: str
    concurrency: tuple[int, ...] = option((10,), "Closed-loop levels: requests in flight.", group="load")
    request_rate: tuple[float, ...] = option((), "Open-loop levels: requests per second.", group="load")
    arrivals: ArrivalProcess = option("poisson", "Arrival process of an open loop.", group="load")
    num_prompts: tuple[int, ...] = option(
        (), "Requests per level: one number for all, or one each (default: levels send for 10 s).", group="load"
    )
    num_warmups: int | None = option(
        None, "Requests before each level that stay out of its results.", group="load", limits={"minimum": 0}
    )
    slo_ms: dict[str, float] = option(
        {},
        "Latency limits of a good request in ms; also itl, e2e and first_audio.",
        group="load",
        flag="--goodput",
        type=parse_slo,
        metavar="ttft:MS,tpot:MS",
    )
    processes: int = option(1, "Client processes.", group="load")
    workload: str = option(
        "problems:short",
        "Prompts: problems:short, random:in=128-1024,out=128, FILE.jsonl, or what another task's models get, below.",
        group="prompts",
    )
    max_tokens: int | None = option(None, "Output limit of prompts that set none.", group="prompts")
    seed: int = option(0, "Seed of prompts and arrivals.", group="prompts")
    model: str | None = option(None, "Model to ask for (default: the first of /v1/models).", group="server")
    api_key: str | None = option(None, "Bearer token.", group="server", metavar="KEY")
    extra_body: dict[str, Any] = option(
        {}, "Fields added to every request.", group="server", type=parse_extra_body, metavar="JSON"
    )
    stream: bool = option(True, "Ask for unstreamed answers: TTFT, ITL and TPOT are not measured.", group="server")
    continuous_usage: bool = option(
        True, "Do not ask for token counts with every event; some servers refuse the field.", group="server"
    )
    tokenizer: str | None = option(
        None,
        "A tokenizer.json or its folder, a hub id or a bundled model: checks the server's token counts, and replaces "
        "them where it sends none.",
        group="results",
        metavar="PATH",
    )
    record_event_times: bool = option(False, "Keep the time of every event in requests.jsonl.", group="results")
    timeouts: Timeouts = Timeouts()  # noqa: RUF009 - a NamedTuple cannot be changed
    temperature: float | None = 0.0  # None: left to the server
    has_chats: bool = True  # else the texts of messages go to /v1/completions
    strict: bool = False  # an answer without text, or without the server's token counts, is a failure
    allow_empty: bool = False  # but an end token alone is complete
    keep_text: bool = False  # of every answer, in its record; else only of the sample that `tokenizer` checks
    records_path: Path | None = None  # requests.jsonl, appended to

    def __post_init__(self) -> None:
        _check_at_least("concurrency", min(self.concurrency, default=0), 1)
        _check_at_least("processes", self.processes, 1)
        if self.num_warmups is not None:
            _check_at_least("num_warmups", self.num_warmups, 0)
        if self.max_tokens is not None:
            _check_at_least("max_tokens", self.max_tokens, 1)
        for name, limit_s in self.timeouts._asdict().items():
            if not limit_s > 0:
                raise ConfigError(f"timeout: {name} must be more than 0 seconds; got {limit_s:g}")
        for rate in self.request_rate:
            if not 0 < rate < math.inf:
                raise ConfigError(f"request_rate must be more than 0 requests per second; got {rate}")
        num_levels = len(self.request_rate or self.concurrency)
        if len(self.num_prompts) not in (0, 1, num_levels):
            raise ConfigError(f"num_prompts has {len(self.num_prompts)} values for {num_levels} levels")
        for name, limit_ms in self.slo_ms.items():
            if not limit_ms > 0:
                raise ConfigError(f"--goodput: {name} must be more than 0 ms; got {limit_ms:g}")
        for level in self.levels:
            _check_at_least("num_prompts", level.num_requests, 1)

    @property
    def levels(self) -> list[Level]:
        """Return the levels in the order of running."""
        loads: list[tuple[int, float | None]] = [(0, rate) for rate in self.request_rate] or [
            (concurrency, None) for concurrency in self.concurrency
        ]
        num_prompts = self.num_prompts * (len(loads) if len(self.num_prompts) == 1 else 1)
        levels = []
        for index, (concurrency, rate) in enumerate(loads):
            send_s = None
            if num_prompts:
                num_requests = num_prompts[index]
            elif rate is not None:
                num_requests = max(1, round(rate * 30))
            else:
                num_requests, send_s = MAX_REQUESTS, DEFAULT_SEND_S
            levels.append(Level(concurrency=concurrency, rate=rate, num_requests=num_requests, duration_s=send_s))
        return levels

    @property
    def num_different_prompts(self) -> int:
        """Return the number of prompts that the levels and their warm-ups need, of which timed ones repeat problems."""
        return sum(
            (level.num_requests if level.duration_s is None else NUM_PROBLEMS) + self.num_warmups_for(level)
            for level in self.levels
        )

    @property
    def plan(self) -> str:
        """Return what the run will send, level by level, and how long it takes at least."""
        levels = self.levels
        least_s = sum(level.least_s for level in levels)
        texts = [f"{level.name}: {level.size_text} after {self.num_warmups_for(level)} warm-ups" for level in levels]
        return f"{'; '.join(texts)}; {f'{least_s:.0f} s or more in all' if least_s else 'the server sets the time'}"

    @property
    def answer_rules(self) -> AnswerRules:
        """Return the conditions that make an answer complete.

        The server's token counts are required if answers are not streamed and no tokenizer is given. Such answers have
        no events to count.
        """
        lacks_token_counts = not self.stream and self.tokenizer is None
        return AnswerRules(
            needs_text=self.strict, allow_empty=self.allow_empty, needs_usage=self.strict or lacks_token_counts
        )

    def num_warmups_for(self, level: Level) -> int:
        """Return the number of warm-up requests before `level`."""
        if self.num_warmups is not None:
            return self.num_warmups
        return min(level.concurrency or 8, level.num_requests, DEFAULT_MAX_WARMUPS)

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings by name for published results, without the API key, the address and local paths."""
        unpublished_fields = {"api_key", "records_path", "tokenizer", "url"}
        published_fields = {name: value for name, value in asdict(self).items() if name not in unpublished_fields}
        return {
            **published_fields,
            "plan": self.plan,
            "timeouts": self.timeouts._asdict(),
            "workload": published_workload(self.workload),
        }


@dataclass(frozen=True, kw_only=True)
class Level:
    """Describes one level of load.

    A closed loop has `concurrency` connections. An open loop has `rate` arrivals per second and a concurrency of 0.
    With `duration_s` a closed loop sends for that time, at least one request per connection. Requests fail that end
    more than `drain_limit_s` after that time, or after the last arrival of an open loop. With `retry_refused` a request
    refused by a 429 or 503 is sent again after its Retry-After.
    """

    concurrency: int
    rate: float | None
    num_requests: int
    duration_s: float | None = None
    drain_limit_s: float = math.inf
    retry_refused: bool = False

    @property
    def name(self) -> str:
        """Return the level's label in records and progress bars."""
        return f"concurrency {self.concurrency}" if self.rate is None else f"rate {self.rate:g}/s"

    @property
    def size_text(self) -> str:
        """Return how much the level sends: a time, or a number of requests."""
        return f"{self.num_requests:,} requests" if self.duration_s is None else f"{self.duration_s:g} s"

    @property
    def least_s(self) -> float:
        """Return the seconds for which the level sends at least, or 0 if the server alone decides that."""
        if self.duration_s is not None:
            return self.duration_s
        return 0.0 if self.rate is None else (self.num_requests - 1) / self.rate

    @property
    def num_connections(self) -> int:
        """Return the number of connections to open before the release.

        It is at most the number of requests, and 0 for an open loop.
        """
        return min(self.concurrency, self.num_requests)


class IntRange(NamedTuple):
    """Holds the inclusive bounds of a whole number. Equal bounds make the number fixed."""

    low: int
    high: int

    @property
    def text(self) -> str:
        """The bounds in the form of options: `128-1024`, or `128` if they are equal."""
        return str(self.low) if self.low == self.high else f"{self.low}-{self.high}"


def parse_range(text: str, name: str) -> IntRange:
    """Parse a number such as `128` or a range such as `128-1024`. Raises ConfigError for other text."""
    match = _RANGE_PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name}: {text!r} is neither a number nor a range such as 128-1024")
    bounds = IntRange(int(match[1]), int(match[2] or match[1]))
    if not 1 <= bounds.low <= bounds.high:
        raise ConfigError(f"{name}: {text} must start at 1 or more and not run backwards")
    return bounds


def workload_fields(spec: str, names: tuple[str, ...]) -> dict[str, str]:
    """Parse the options after the colon of a workload description, such as `in=128,out=64`, into texts by name.

    Raises ConfigError for an unknown or repeated option.
    """
    fields: dict[str, str] = {}
    for field_text in filter(None, spec.partition(":")[2].split(",")):
        match = _FIELD_PATTERN.fullmatch(field_text)
        if match is None or match[1] not in names:
            raise ConfigError(
                f"workload {spec}: {field_text!r} is not one of {', '.join(f'{field}=...' for field in names)}"
            )
        if match[1] in fields:
            raise ConfigError(f"workload {spec}: {match[1]} is given twice")
        fields[match[1]] = match[2]
    return fields


def parse_numbers(text: str, name: str, number_type: type[_Number]) -> tuple[_Number, ...]:
    """Parse numbers such as `10,100` into a tuple of `number_type`. Raises ConfigError for other text."""
    try:
        return tuple(read_number(number_text, number_type) for number_text in text.split(","))
    except ValueError as error:
        raise ConfigError(f"{name}: {text!r} is not a list of numbers such as 10,100") from error


def _check_at_least(name: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise ConfigError(f"{name} must be at least {minimum}; got {value}")
