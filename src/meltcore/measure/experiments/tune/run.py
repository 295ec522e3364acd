"""Starts and loads a server with one setting, which gives a point, and combines the points into a result.

A sweep over concurrent sequences and token budgets marks the best point and the knee. The first start uses the server's
default settings, and every gain is relative to the first start. The knee is the smallest setting within 2 % of the best
output rate, among settings that meet the SLO. Larger settings cost memory and latency without more output.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from meltcore.common.errors import ConfigError
from meltcore.common.files import write_document
from meltcore.common.process import ProcessError
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.tuning import (
    MIN_SLO_ATTAINMENT,
    TUNING_FILE,
    Fact,
    Tuning,
    TuningKind,
    TuningPoint,
    default_point,
    gain,
    repeats_default,
)
from meltcore.measure.documents.values.formatting import format_change, format_number
from meltcore.measure.documents.values.progress import warning_printer
from meltcore.measure.documents.verdicts import SCORED
from meltcore.measure.experiments.servers import START_LIMIT_S, ServerCommand, ServerProcess, run_server
from meltcore.measure.experiments.tune.config import BatchingOptions
from meltcore.measure.load.config import LoadConfig
from meltcore.measure.load.run.runner import measure
from meltcore.measure.report.comparisons.tuning import tuning_page
from meltcore.measure.report.page.html import write_page

# Options of the server by setting; ours and vLLM's have the same names.
FLAGS = {name: f"--{name.replace('_', '-')}" for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens")}
POINTS_FILE = "points.jsonl"
ONE_START = "One start per point: confirm a gain with `meltcore compare --run` before relying on it."
MONOTONE = "The search assumes that a value below one that works also works."
_REASON_LINES = 3
_DEFAULT_SEQS = re.compile(r"\b(\d+) sequences per step")  # in the lines with which our server becomes ready

KNEE_RATIO = 0.98  # of the best output rate
_BUDGETS = ("max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True, kw_only=True)
class Tuner:
    """The server to tune, the folder for its logs, and the console that shows each point.

    `flags` maps settings to options of the server. `checkpoint` is the model that Meltcore's engine serves. It is None
    for another server.
    """

    command: ServerCommand
    folder: Path
    console: Console
    flags: Mapping[str, str]
    checkpoint: str | None = None
    arguments: tuple[str, ...] = ()
    start_limit_s: float = START_LIMIT_S

    def measure(
        self,
        settings: dict[str, int | str],
        load: LoadConfig | None,
        *,
        args: Sequence[str] | None = None,
        on_ready: Callable[[ServerProcess], None] = lambda _server: None,
        inspect: Callable[[ServerProcess, TuningPoint], None] | None = None,
    ) -> TuningPoint:
        """Start the server with `settings`, load it and end it. A failed start yields a point with `ok` False.

        `args` replaces the arguments made from `settings`. `on_ready` receives the server before the load. `inspect`
        receives the server after the load, with the point to complete.
        """
        if args is None:
            args = [part for name, value in settings.items() for part in (self.flags[name], str(value))]
        point = TuningPoint(settings=settings, args=list(args), ok=True)
        name = "-".join(str(value).replace(" ", "-") for value in settings.values()) or "default"
        log_path = self.folder / f"server-{name}.log"
        try:
            with run_server(
                self.command, log_path, report=warning_printer(self.console), args=args, limit_s=self.start_limit_s
            ) as server:
                point.ready_s = server.ready_s
                on_ready(server)
                if load is not None:
                    _record_load(point, measure(replace(load, url=server.url), self.arguments))
                if inspect is not None:
                    inspect(server, point)
        except ProcessError as error:
            point.ok, point.reason = False, _reason(error)
        with (self.folder / POINTS_FILE).open("ab") as points:  # an interruption must not lose an hour of starts
            points.write(msgspec.json.encode(point) + b"\n")
        outcome = f"{format_number(point.output_tokens_per_s)} tok/s" if point.ok else point.reason
        self.console.print(f"{point.label}: {outcome}", markup=False, highlight=False)
        return point


def parse_flags(texts: Sequence[str]) -> dict[str, str]:
    """Return FLAGS, with entries replaced by flags of another server such as `max_num_seqs=-np`.

    Raises ConfigError if a text is malformed.
    """
    flags = dict(FLAGS)
    for text in texts:
        name, _, flag = text.partition("=")
        if name not in FLAGS or not flag:
            raise ConfigError(f"--flag {text!r} is not of the form SETTING=OPTION; settings are {', '.join(FLAGS)}")
        flags[name] = flag
    return flags


def make_tuning(
    kind: TuningKind,
    tuner: Tuner,
    load: LoadConfig,
    points: Sequence[TuningPoint],
    finding: str,
    *,
    best_and_knee: tuple[int | None, int | None] = (None, None),
    facts: Sequence[Fact] = (),
) -> Tuning:
    """Return the whole result. Only a sweep has a best point and a knee, given as indices of `points`."""
    notes = [MONOTONE if kind == "context" else ONE_START]
    if load.slo_ms:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in load.slo_ms.items())
        notes.append(
            f"SLO: {limits}; a point qualifies where {100 * MIN_SLO_ATTAINMENT:.0f} % of its requests meet it."
        )
    tuning = Tuning(
        kind=kind,
        finding=finding,
        command=tuner.command.redacted,
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=take_fingerprint(tuner.arguments, load.seed),
        default_settings=_default_settings(tuner.folder),
        load={} if kind == "context" else load.settings,  # a search loads each try differently
        slo_ms=dict(load.slo_ms),
        points=list(points),
        best=best_and_knee[0],
        knee=best_and_knee[1],
        facts=list(facts),
        notes=notes,
    )
    tuning.notes += [
        f"{point.label} is the server's default: a second start of the same setting, "
        f"{format_change(gain(point, tuning.default))} from the first, which is noise and no gain."
        for point in points
        if point.output_tokens_per_s and repeats_default(tuning, point)
    ]
    return tuning


def _default_settings(folder: Path) -> dict[str, int]:
    """Return the settings that Meltcore's server printed when it started without settings.

    Returns an empty dict for other servers.
    """
    log = folder / "server-default.log"
    match = _DEFAULT_SEQS.search(log.read_text(errors="replace")) if log.exists() else None
    return {"max_num_seqs": int(match[1])} if match else {}


def save_tuning(folder: RunFolder, tuning: Tuning) -> None:
    """Write the result as JSON and as an HTML page."""
    write_document(folder.path / TUNING_FILE, tuning)
    write_page(folder.report_path, tuning_page(tuning))


def _record_load(point: TuningPoint, result: RunResult) -> None:
    """Copy the metrics of the only level to the point. Raises KeyboardInterrupt if the load was interrupted."""
    if result.verdict == "PARTIAL":
        raise KeyboardInterrupt
    level = result.levels[-1]
    point.output_tokens_per_s = level.output_tokens_per_s
    point.ttft_ms, point.itl_ms = level.ttft_ms.p50, level.itl_ms.p50
    if level.goodput_per_s is not None and level.requests:
        point.slo_attainment = round(level.goodput_per_s * level.duration_s) / level.requests
    if level.verdict not in SCORED:
        point.ok, point.reason = False, "; ".join(level.reasons) or level.verdict


def _reason(error: ProcessError) -> str:
    """Return the first line of the error and the last lines of the log, which name the cause."""
    first, *log = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{first} {' | '.join(log[-_REASON_LINES:])}".strip()


def tune_batching(tuner: Tuner, options: BatchingOptions, load: LoadConfig) -> Tuning:
    """Measure the default settings, then every pair of settings, and return the tuning with best point and knee.

    The pairs are ordered by token budget and then by sequences.
    """
    settings: list[dict[str, int | str]] = [
        {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
        for tokens in options.max_num_batched_tokens
        for seqs in options.max_num_seqs
    ] or [{"max_num_seqs": seqs} for seqs in options.max_num_seqs]
    points = [tuner.measure(point_settings, load) for point_settings in ({}, *settings)]
    best, knee = best_and_knee(points)
    finding = batching_finding(points, best, knee)
    return make_tuning("batching", tuner, load, points, finding, best_and_knee=(best, knee))


def best_and_knee(points: Sequence[TuningPoint]) -> tuple[int | None, int | None]:
    """Return the indices of the fastest point and of the knee, among settings that ran and met the SLO."""
    rates = {index: point.output_tokens_per_s or 0.0 for index, point in enumerate(points) if _qualifies(point)}
    if not rates:
        return None, None
    best_index = max(rates, key=lambda index: rates[index])
    near_best = [index for index, rate in rates.items() if rate >= KNEE_RATIO * rates[best_index]]
    return best_index, min(
        near_best,
        key=lambda index: [int(points[index].settings[name]) for name in _BUDGETS if name in points[index].settings],
    )


def batching_finding(points: Sequence[TuningPoint], best_index: int | None, knee: int | None) -> str:
    """Return the result in one sentence, and the gain over the default settings in another."""
    if best_index is None or knee is None:
        tuned_points = [point for point in points if point.settings]
        num_ran = sum(point.ok for point in tuned_points)
        return f"No setting meets the SLO: {num_ran} of {len(tuned_points)} ran." if num_ran else "No setting ran."
    best_point, knee_point = points[best_index], points[knee]
    if best_index == knee:
        answer = (
            f"{describe(best_point.settings)} is the fastest, with no smaller setting near it: "
            f"{format_number(best_point.output_tokens_per_s)} output tok/s."
        )
    else:
        ratio = (knee_point.output_tokens_per_s or 0.0) / (best_point.output_tokens_per_s or 1.0)
        answer = (
            f"The knee is {describe(knee_point.settings)}: {format_number(knee_point.output_tokens_per_s)} output "
            "tok/s, "
            f"{100 * ratio:.1f} % of the best ({describe(best_point.settings)}: "
            f"{format_number(best_point.output_tokens_per_s)})."
        )
    default = default_point(points)
    if default is None:
        return answer
    gains = [format_change(gain(points[index], default)) for index in dict.fromkeys((knee, best_index))]
    text = gains[0] if len(gains) == 1 else f"{gains[0]} at the knee, {gains[1]} at the best"
    return f"{answer} Against the default settings ({format_number(default.output_tokens_per_s)} output tok/s): {text}."


def describe(settings: dict[str, int | str]) -> str:
    """Format {"max_num_seqs": 32, "max_num_batched_tokens": 2048} as "32 sequences, 2,048 tokens per step"."""
    units = {
        "max_num_seqs": "sequences",
        "max_num_batched_tokens": "tokens per step",
        "max_model_len": "tokens of context",
    }
    return ", ".join(
        f"{value:,} {units[name]}" if isinstance(value, int) else str(value) for name, value in settings.items()
    )


def _qualifies(point: TuningPoint) -> bool:
    # The default settings, an empty dict, are what gains are counted from and no candidate.
    meets_slo = point.slo_attainment is None or point.slo_attainment >= MIN_SLO_ATTAINMENT
    return bool(point.settings) and point.ok and meets_slo
