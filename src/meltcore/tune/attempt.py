"""One start of the server with one setting, loaded once: what every kind of tuning is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from meltcore.errors import ConfigError
from meltcore.evals.server_process import ServerError
from meltcore.load.config import LoadConfig
from meltcore.load.run import measure
from meltcore.results.schema import LevelResult, RunResult
from meltcore.results.tuning import TuningPoint
from meltcore.trials.command import ServerCommand
from meltcore.trials.server import START_LIMIT_S, RunningServer, started

# How a setting is told to a server; ours and vLLM's have the same names for these.
FLAGS = {"length": "--max-model-len", "seqs": "--max-num-seqs", "tokens": "--max-num-batched-tokens"}
POINTS_FILE = "points.jsonl"
_WHY_LINES = 3

Look = Callable[[RunningServer, RunResult | None, TuningPoint], None]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The server to tune, where its logs go, and who is told what. `flags` maps our words to the server's options."""

    command: ServerCommand
    folder: Path
    say: Callable[[str], None]
    on_point: Callable[[TuningPoint], None]
    flags: Mapping[str, str]
    arguments: tuple[str, ...] = ()
    start_limit_s: float = START_LIMIT_S

    def words(self, settings: Mapping[str, int | str]) -> list[str]:
        """The settings as arguments of the server."""
        return [word for name, value in settings.items() for word in (self.flags[name], str(value))]


def flags_of(texts: Sequence[str]) -> dict[str, str]:
    """FLAGS with those of another server in place, as `seqs=-np`. Raises ConfigError."""
    flags = dict(FLAGS)
    for text in texts:
        name, equals, flag = text.partition("=")
        if name not in FLAGS or not equals or not flag:
            raise ConfigError(f"--flag {text!r} is not of the form seqs=--option, with {', '.join(FLAGS)} before the =")
        flags[name] = flag
    return flags


def attempt(
    bench: Bench,
    settings: dict[str, int | str],
    load: LoadConfig | None,
    *,
    words: Sequence[str] | None = None,
    before: Callable[[RunningServer], None] | None = None,
    look: Look | None = None,
) -> TuningPoint:
    """Start with `settings` (or `words` for them), load, end. A server that does not start is a point, not an error.

    `before` sees the running server before the load, `look` after it, with the load's result and the point to add to.
    """
    args = bench.words(settings) if words is None else list(words)
    point = TuningPoint(settings=settings, words=args, ok=True)
    name = "-".join(str(value).replace(" ", "-") for value in settings.values()) or "as-shipped"
    log_path = bench.folder / f"server-{name}.log"
    try:
        with started(bench.command, log_path, say=bench.say, args=args, limit_s=bench.start_limit_s) as server:
            point.ready_s = server.ready_s
            result = None
            if before is not None:
                before(server)
            if load is not None:
                result = measure(replace(load, url=server.url), bench.arguments)
                _take(point, result)
            if look is not None:
                look(server, result, point)
    except ServerError as error:
        point.ok, point.why = False, why_of(error)
    with (bench.folder / POINTS_FILE).open("ab") as points:  # an hour of starts is not lost to an interruption
        points.write(msgspec.json.encode(point) + b"\n")
    bench.on_point(point)
    return point


def _take(point: TuningPoint, result: RunResult) -> None:
    """The numbers of the one level. Raises KeyboardInterrupt where the load was interrupted."""
    if result.verdict == "PARTIAL":
        raise KeyboardInterrupt
    level: LevelResult = result.levels[-1]
    point.output_tokens_per_s = level.output_tokens_per_s
    point.ttft_ms, point.itl_ms = level.ttft_ms.p50, level.itl_ms.p50
    if level.goodput_per_s is not None and level.requests:
        point.within_limits = round(level.goodput_per_s * level.duration_s) / level.requests
    if level.verdict not in ("OK", "CLIENT_BOUND"):
        point.ok, point.why = False, "; ".join(level.reasons) or level.verdict


def why_of(error: ServerError) -> str:
    """The first line of the error and the last words of the log, which name the cause."""
    first, *log = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{first} {' | '.join(log[-_WHY_LINES:])}".strip()
