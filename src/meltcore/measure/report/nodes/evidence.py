"""Converts documents to evidence of a card: a verdict, a summary, and the reasons why it is not a PASS."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from meltcore.measure.documents.card import Evidence
from meltcore.measure.documents.certificate import Certificate
from meltcore.measure.documents.comparison import ComparisonResult
from meltcore.measure.documents.gaps import GpuProfile
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.served_model import command_model, model_text
from meltcore.measure.documents.snapshot import Snapshot
from meltcore.measure.documents.tuning import Tuning
from meltcore.measure.documents.values.documents import Content, DocumentFile
from meltcore.measure.documents.values.formatting import (
    eval_score_line,
    evaluation_line,
    format_number,
    result_warnings,
    weighted_throughput_line,
)
from meltcore.measure.documents.values.score_summary import expectations
from meltcore.measure.documents.values.throughput import throughput
from meltcore.measure.documents.verdicts import MEANINGS, CheckVerdict
from meltcore.measure.load.tasks.task import throughput_text
from meltcore.measure.report.comparisons.comparison import comparison_headline
from meltcore.measure.report.nodes.profile import profile_headline

EvidenceParts = tuple[CheckVerdict, str, list[str]]  # verdict, summary, reasons


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
    checks = (
        f"{num_passed} of {len(certificate.checks)} checks of the {certificate.tier} tier passed on "
        f"{_count_gpus(len(certificate.snapshot.gpus))}"
    ) + "".join(f", {count} {verdict}" for verdict, count in verdicts.items())
    reasons = [f"{finding.subject}: {finding.code}: {finding.message}" for finding in certificate.findings]
    if not reasons and certificate.verdict != "PASS":
        reasons = [f"not verified: {item}" for item in certificate.unverified] or ["no check passed"]
    return certificate.verdict, checks, reasons


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
        lines.append(throughput_text(max(run.levels, key=throughput)))
    if run.checks:
        num_passed = sum(check.status == "PASS" for check in run.checks)
        lines.append(f"API forms: {num_passed} of {len(run.checks)}")
    details = " ".join(
        str(detail) for detail in (run.command, run.settings.get("what"), model_text(run.settings)) if detail
    )
    return f"{details}: {'; '.join(lines) or 'nothing measured'}"
