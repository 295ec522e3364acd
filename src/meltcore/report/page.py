"""Gathers what the page shows and fills the template. The template holds no arithmetic, this file no markup."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from meltcore.report.charts import Series, against_load
from meltcore.report.score_page import render_score
from meltcore.report.template import fill
from meltcore.report.timeline import timeline
from meltcore.results import wording
from meltcore.results.definitions import DEFINITIONS, define
from meltcore.results.percentiles import QUANTILES, SAMPLES_NEEDED, TOO_SMALL
from meltcore.results.runfolder import RunFolder
from meltcore.results.schema import Distribution, EvalScore, LevelResult, RunResult
from meltcore.results.score import ScoredRun
from meltcore.results.weights import WEIGHTS

_DISTRIBUTIONS = ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms", "queue_delay_ms")


@dataclass(frozen=True)
class Chart:
    title: str
    picture: Markup
    legend: list[Series]
    note: str = ""


def render(result: RunResult) -> str:
    """One HTML page for `result`: style and drawings inside, no script, nothing fetched."""
    if isinstance(result, ScoredRun):
        return render_score(result)
    return fill("report.html", result=result, **_context(result))


def save(folder: RunFolder, result: RunResult) -> None:
    """Write both `result.json` and `report.html` of a run."""
    folder.write_result(result)
    folder.write_report(render(result))


def _context(result: RunResult) -> dict[str, Any]:
    return {
        "started": wording.moment(result.started),
        "tiles": tiles(result),
        "distrust": wording.reasons_to_distrust(result),
        "charts": charts(result.levels),
        "timelines": [(level, drawn) for level in result.levels if (drawn := timeline(level)) is not None],
        "distribution_names": [define(name).name for name in _DISTRIBUTIONS],
        "distribution_rows": _distribution_rows,
        "percentile": _percentile,
        "several_workloads": len({level.workload for level in result.levels}) > 1,
        "has_slo": any(level.slo for level in result.levels),
        "percentile_names": ["p" + f"{100 * share:g}" for share in QUANTILES.values()],
        "samples_needed": SAMPLES_NEEDED,
        "fingerprint": wording.fingerprint_rows(result.fingerprint),
        "settings": [(name, wording.setting(value)) for name, value in result.settings.items()],
        "definitions": DEFINITIONS,
        "weighted": _weighted(result),
    }


def tiles(result: RunResult) -> list[tuple[str, str, str]]:
    """(label, figure, small print): the few numbers a reader looks for first."""
    found: list[tuple[str, str, str]] = []
    if result.eval_score is not None:
        found.append(_score_tile(result.eval_score))
    if result.evaluation is not None:
        answers = result.evaluation
        bounds = f"95 % interval {100 * answers.low:.1f} to {100 * answers.high:.1f} %"
        interval = f"{answers.right:,} of {answers.asked:,}; {bounds}"
        found.append(("Right answers, unloaded", wording.percent(answers.share), interval))
    if result.levels:
        best = max(result.levels, key=lambda level: level.output_tokens_per_s)
        found.append(
            ("Best throughput", wording.number(best.output_tokens_per_s), f"output tok/s, {wording.load_of(best)}")
        )
        peak = max(result.levels, key=lambda level: level.peak_in_flight)
        found.append(
            ("Most in flight", f"{peak.peak_in_flight:,}", f"{peak.succeeded:,} of {peak.requests:,} answered")
        )
        if result.speed_sum is not None:
            total, output = result.speed_sum.total_tokens_per_s, result.speed_sum.output_tokens_per_s
            small = f"total tok/s weighted, answers unchecked; output tokens alone: {wording.number(output)}"
            found.append(("Speed sum", wording.number(total), small))
        failed = sum(level.failed for level in result.levels)
        found.append(("Failed requests", f"{failed:,}", f"of {sum(level.requests for level in result.levels):,}"))
    if result.checks:
        passed = sum(check.status == "PASS" for check in result.checks)
        found.append(("API checks passed", f"{passed} of {len(result.checks)}", "OpenAI forms and errors"))
    return found


def _weighted(result: RunResult) -> dict[str, Any] | None:
    """What an evaluation's levels add up to: a title, a line, and a row a level."""
    if result.command != "eval" or not result.levels:
        return None
    title, line = "Tokens per second, both ways to count", ""
    if result.eval_score is not None:
        title, line = "Score", wording.eval_score_line(result.eval_score)
    elif result.speed_sum is not None:
        title, line = "Speed sum", wording.speed_sum_line(result.speed_sum)
    rows = []
    for level in result.levels:
        weight = WEIGHTS.get(level.concurrency, 0)
        rates = (level.total_tokens_per_s, level.output_tokens_per_s)
        rows.append((level, weight, [wording.number(each) for rate in rates for each in (rate, weight * rate)]))
    return {"title": title, "line": line, "rows": rows}


def _score_tile(found: EvalScore) -> tuple[str, str, str]:
    small = f"prompts and answers, weighted; answers alone: {wording.number(found.output_tokens_per_s)}"
    return ("Score", wording.number(found.total_tokens_per_s), "a gate failed" if found.zero_because else small)


def charts(levels: Sequence[LevelResult]) -> list[Chart]:
    """Throughput and latencies against load: of closed and open levels apart, and of those that are several."""
    closed = [level for level in levels if level.load_kind == "closed"]
    opened = [level for level in levels if level.load_kind == "open"]
    return [chart for kind in (closed, opened) if len(kind) > 1 for chart in _charts(kind)]


def _charts(levels: Sequence[LevelResult]) -> list[Chart]:
    note = f"p95 stands from {SAMPLES_NEEDED['p95']} samples on, p99 from {SAMPLES_NEEDED['p99']}."
    wanted = [
        (
            "Output tokens per second",
            "tok/s",
            False,
            "",
            [
                Series("whole level", 1, lambda level: level.output_tokens_per_s),
                Series("steady window", 3, _steady, dashed=True),
            ],
        ),
        ("Time to first token", "ms", True, note, _percentiles("ttft_ms")),
        ("Inter-token latency", "ms", True, note, _percentiles("itl_ms")),
        ("End to end", "ms", True, note, _percentiles("e2e_ms")),
    ]
    charts = []
    for title, unit, log_y, small_print, series in wanted:
        drawn = against_load(levels, series, unit=unit, log_y=log_y, label=f"{title} against load")
        present = [line for line in series if any(line.value(level) is not None for level in levels)]
        if drawn is not None:
            charts.append(Chart(title, drawn, present, small_print))
    return charts


def _steady(level: LevelResult) -> float | None:
    return level.steady.output_tokens_per_s if level.steady is not None else None


def _percentiles(field: str) -> list[Series]:
    return [
        Series("p50", 1, lambda level: getattr(level, field).p50),
        Series("p95", 3, lambda level: getattr(level, field).p95),
        Series("p99", 2, lambda level: getattr(level, field).p99),
    ]


def _distribution_rows(level: LevelResult) -> list[tuple[str, Distribution]]:
    return [(define(name).name, getattr(level, name)) for name in _DISTRIBUTIONS]


def _percentile(distribution: Distribution, name: str) -> Markup | str:
    """As wording.percentile, with "n too small" set back so that the numbers stand out."""
    found = wording.percentile(distribution, name)
    return Markup('<span class="faint">{}</span>').format(found) if found == TOO_SMALL else found
