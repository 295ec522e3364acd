"""Converts documents to evidence of a card: a verdict, a summary, and the reasons why it is not a PASS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meltcore.measure.documents.card import Evidence, Story
from meltcore.measure.documents.comparison import ComparisonResult
from meltcore.measure.documents.gaps import GpuProfile
from meltcore.measure.documents.node import Certificate, Snapshot
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.served_model import command_model, model_text
from meltcore.measure.documents.tuning import Tuning, TuningPoint, gain, repeats_default
from meltcore.measure.documents.values.documents import Content, DocumentFile
from meltcore.measure.documents.values.formatting import (
    eval_score_line,
    evaluation_line,
    format_change,
    format_load_settings,
    format_number,
    result_warnings,
    weighted_throughput_line,
)
from meltcore.measure.documents.values.scores import expectations
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict, Verdict
from meltcore.measure.load.tasks.task import throughput_text
from meltcore.measure.report.comparisons.comparison import changed_arguments, comparison_headline
from meltcore.measure.report.nodes.profile import profile_headline

EvidenceParts = tuple[CheckVerdict, str, list[str]]  # verdict, summary, reasons
_STORY_STATES: dict[str, Verdict] = {"IMPROVEMENT": "CONFIRMED", "REGRESSION": "CONTRADICTED"}
# Below it a gain of one start each is no story: two starts of one setting may differ as much.
_MIN_ONE_START_GAIN = 0.05
_SAME_LOAD = ("workload", "concurrency", "max_tokens", "seed")


def evidence_of(document: DocumentFile, changed_facts: Sequence[str] = ()) -> Evidence:
    """Return a document as evidence of a card.

    `changed_facts` are the differences between the snapshot and the certificate.
    """
    content, evidence_type = document.content, document.type
    assert evidence_type is not None, "a card is not evidence for another"
    verdict, summary, reasons = (
        _judge_snapshot(content, changed_facts) if isinstance(content, Snapshot) else _judge(content)
    )
    return Evidence(
        type=evidence_type,
        verdict=verdict,
        summary=summary,
        reasons=reasons,
        source=document.source,
        taken=document.taken,
    )


def _judge(content: Content) -> EvidenceParts:
    if isinstance(content, Certificate):
        return _judge_certificate(content)
    if isinstance(content, ScoredRun):
        return _judge_benchmark(content)
    if isinstance(content, RunResult):
        return _judge_run(content)
    if isinstance(content, Tuning):
        failures = [] if content.has_result else ["no setting ran and kept to the limits"]
        line = _join(f"tune {content.kind}", command_model(content.command))
        return "FAIL" if failures else "PASS", f"{line}: {content.finding}", failures
    if isinstance(content, GpuProfile):
        line = " ".join(f"GPU {report.device}: {profile_headline(report)}" for report in content.reports)
        reasons = [f"GPU {report.device}: {reason}" for report in content.reports for reason in report.untrusted]
        return "UNKNOWN" if reasons else "PASS", line, reasons
    assert isinstance(content, ComparisonResult)
    reasons = [f"does not compare: {reason}" for reason in content.doubts]
    verdict = "UNKNOWN" if reasons else MEANINGS[content.verdict].check
    line = _join(content.verdict, command_model(content.new_command))
    return verdict, f"{line}: {comparison_headline(content)}", reasons  # the sentence says why


def _judge_snapshot(snapshot: Snapshot, changed_facts: Sequence[str]) -> EvidenceParts:
    line = f"driver {snapshot.driver}, CUDA {snapshot.cuda_driver}, {_count_gpus(len(snapshot.gpus))}"
    return (
        ("WARN" if changed_facts else "RECORDED"),
        line,
        [f"not as in the certificate: {fact}" for fact in changed_facts],
    )


def _join(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


def _count_gpus(count: int) -> str:
    return f"{count} GPU{'s'[: count != 1]}"


def _judge_certificate(certificate: Certificate) -> EvidenceParts:
    verdicts = Counter(check.verdict for check in certificate.checks)
    num_passed = verdicts.pop("PASS", 0)
    summary = (
        f"{num_passed} of {len(certificate.checks)} checks of the {certificate.tier} tier passed on "
        f"{_count_gpus(len(certificate.snapshot.gpus))}"
    ) + "".join(f", {count} {verdict}" for verdict, count in verdicts.items())
    reasons = [f"{finding.subject}: {finding.code}: {finding.message}" for finding in certificate.findings]
    if not reasons and certificate.verdict != "PASS":
        reasons = [f"not verified: {item}" for item in certificate.unverified] or ["no check passed"]
    return certificate.verdict, summary, reasons


def _judge_benchmark(run: ScoredRun) -> EvidenceParts:
    score = run.score
    if score.output_tokens_per_s is None:
        failures = [f"{device.label}: {device.failure}" for device in score.devices if device.failure]
        return "FAIL", "no score", [*run.reasons, *failures]
    rate = format_number(score.output_tokens_per_s)
    failed = [expectation for expectation in expectations(score) if expectation.verdict == "FAIL"]
    sustained = "" if any(expectation.name == "throughput" for expectation in failed) else " sustained"
    model = model_text({"model": f"{score.model} {score.dtype}", "weights": score.weights})
    line = f"{rate} output tok/s{sustained}, {score.workload}, {model}"
    reasons = [*run.reasons, *(f"ranks with nothing: {reason}" for reason in score.not_comparable)]
    if run.status == "partial" or run.verdict == "PARTIAL":
        return "UNKNOWN", line, ["it was cut short", *reasons]
    if run.verdict in ("FAILED", "SERVER_DIED"):
        return "FAIL", line, reasons or [run.verdict]
    health_reasons = [
        f"{device.label}: {reason}" for device in score.devices if device.health for reason in device.health.reasons
    ]
    verdict = MEANINGS[score.health].check
    if verdict == "PASS" and (score.not_comparable or run.verdict == "CLIENT_BOUND" or failed):
        verdict = "WARN"
    if failed:
        labels = tuple(f"{device.label}: " for device in score.devices)
        reasons += [
            f"expectation of {expectation.name} failed: expected {expectation.expected}, seen {expectation.seen}"
            for expectation in failed
        ]
        reasons += [note for note in run.notes if note.startswith(labels)]  # other notes hold for every such run
    return verdict, f"{line}, {score.health}", [*reasons, *(health_reasons if verdict != "PASS" else [])]


def _judge_run(run: RunResult) -> EvidenceParts:
    reasons = result_warnings(run)
    reasons += [f"{gate.name}: {gate.status}{f': {gate.detail}' * bool(gate.detail)}" for gate in run.gates
                if gate.status != "PASS"]  # fmt: skip
    if run.eval_score is not None:
        reasons += run.eval_score.zero_reasons
    reasons = list(dict.fromkeys(reasons))
    return _run_verdict(run, reasons), _run_line(run), reasons


def _run_verdict(run: RunResult, reasons: Sequence[str]) -> CheckVerdict:
    if run.verdict in ("FAILED", "SERVER_DIED") or any(gate.status == "FAIL" for gate in run.gates):
        return "FAIL"
    if run.eval_score is not None and run.eval_score.zero_reasons:
        return "FAIL"
    if run.status == "partial" or run.verdict == "PARTIAL" or any(gate.status == "NOT RUN" for gate in run.gates):
        return "UNKNOWN"
    return "WARN" if reasons or run.verdict == "CLIENT_BOUND" else "PASS"


def _run_line(run: RunResult) -> str:
    lines = []
    if run.eval_score is not None:
        lines.append(eval_score_line(run.eval_score))
    elif run.weighted_throughput is not None:
        lines.append(weighted_throughput_line(run.weighted_throughput))
    if run.evaluation is not None:
        lines.append(evaluation_line(run.evaluation))
    if run.levels and not lines:
        lines.append(throughput_text(max(run.levels, key=lambda level: level.throughput)))
    if run.checks:
        num_passed = sum(check.status == "PASS" for check in run.checks)
        lines.append(f"API forms: {num_passed} of {len(run.checks)}")
    details = " ".join(
        str(detail) for detail in (run.command, run.settings.get("what"), model_text(run.settings)) if detail
    )
    return f"{details}: {'; '.join(lines) or 'nothing measured'}"


def build_stories(tunings: Sequence[Tuning], comparisons: Sequence[ComparisonResult]) -> list[Story]:
    """Return one story per comparison that changed the command, then one per tuning without a comparison."""
    comparison_stories = [
        _comparison_story(index, comparison, tunings)
        for index, comparison in enumerate(comparisons)
        if changed_arguments(comparison.old_command, comparison.new_command) != ([], [])
    ]
    compared_tunings = {story.tuning for story in comparison_stories}
    tuning_stories = [
        _tuning_story(index, tuning) for index, tuning in enumerate(tunings) if index not in compared_tunings
    ]
    return comparison_stories + [story for story in tuning_stories if story is not None]


def _comparison_story(index: int, comparison: ComparisonResult, tunings: Sequence[Tuning]) -> Story:
    removed, added = changed_arguments(comparison.old_command, comparison.new_command)
    story = Story(
        change=_describe_change(removed, added),
        workload=format_load_settings(comparison.load),
        state=_STORY_STATES.get(comparison.verdict, "NOT CONFIRMED") if not comparison.doubts else "NOT CONFIRMED",
        compared=f"{comparison.verdict}: {comparison_headline(comparison)}",
        comparison=index,
    )
    for tuning_index, tuning in enumerate(tunings):
        point = next((candidate for candidate in tuning.points if candidate.args and candidate.args == added), None)
        if point is not None and not removed:
            story.tuning = tuning_index
            story.tuned = _describe_tuning(tuning, point)
            if any(tuning.load.get(name) != comparison.load.get(name) for name in _SAME_LOAD):
                story.tuned += f" It was tuned on another load: {format_load_settings(tuning.load) or 'not told'}."
            break
    return story


def _tuning_story(index: int, tuning: Tuning) -> Story | None:
    """Return the story of a tuning without a comparison, or None if every gain is within the noise of one start.

    The story is about the tuning's knee, or about its fastest setting if the knee is the default.
    """
    successful_points = [
        point
        for point in tuning.points
        if point.ok and point.args and point.output_tokens_per_s and not repeats_default(tuning, point)
    ]
    if not successful_points or tuning.default is None:
        return None
    fastest = max(successful_points, key=lambda point: point.output_tokens_per_s or 0.0)
    knee = fastest if tuning.knee is None else tuning.points[tuning.knee]
    point = fastest if repeats_default(tuning, knee) else knee
    if (gain(point, tuning.default) or 0.0) < _MIN_ONE_START_GAIN:
        return None
    return Story(
        change=_describe_change([], point.args),
        workload=format_load_settings(tuning.load),
        state="NOT CONFIRMED",
        tuned=_describe_tuning(tuning, point),
        compared="No comparison of fresh starts changed just this.",
        tuning=index,
    )


def _describe_tuning(tuning: Tuning, point: TuningPoint) -> str:
    default = tuning.default
    rate = format_number(point.output_tokens_per_s)
    line = f"tune {tuning.kind}, one start each: {point.label} gave {rate} output tok/s"
    relative_gain = gain(point, default)
    if default is None or relative_gain is None:
        return f"{line}."
    return (
        f"{line}, {format_change(relative_gain)} over the default settings "
        f"({format_number(default.output_tokens_per_s)})."
    )


def _describe_change(removed: Sequence[str], added: Sequence[str]) -> str:
    if not removed:
        return f"with {' '.join(added)}"
    return f"{' '.join(added)} in place of {' '.join(removed)}" if added else f"without {' '.join(removed)}"
