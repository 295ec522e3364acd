"""What one document means for a card: its verdict, a sentence, and the reasons why it is no pass."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.report.documents import Document
from meltcore.report.gaps_output import headline as gaps_headline
from meltcore.report.judge_output import headline as judge_headline
from meltcore.results.card import Part, PartVerdict
from meltcore.results.certificate import Certificate
from meltcore.results.gaps import Profile
from meltcore.results.judgement import Judgement, JudgementWord
from meltcore.results.schema import RunResult
from meltcore.results.score import HealthVerdict, ScoredRun
from meltcore.results.snapshot import Snapshot
from meltcore.results.tuning import Tuning
from meltcore.results.wording import (
    eval_score_line,
    evaluation_line,
    load_of,
    number,
    reasons_to_distrust,
    speed_sum_line,
)

Found = tuple[PartVerdict, str, list[str]]

_JUDGED: dict[JudgementWord, PartVerdict] = {
    "IMPROVEMENT": "PASS",
    "NO EVIDENCE": "PASS",
    "REGRESSION": "FAIL",
    "UNDERPOWERED": "UNKNOWN",
}
_HEALTH: dict[HealthVerdict, PartVerdict] = {"HEALTHY": "PASS", "DEGRADED": "FAIL", "UNKNOWN": "UNKNOWN"}


def part_of(document: Document, drifted: Sequence[str] = ()) -> Part:
    """`drifted`: what changed between the snapshot and the certificate, told of the snapshot."""
    content, kind = document.content, document.kind
    assert kind is not None, "a card is no part of another"
    if isinstance(content, Snapshot):
        found = _snapshot(content, drifted)
    elif isinstance(content, Certificate):
        found = _certificate(content)
    elif isinstance(content, ScoredRun):
        found = _benchmark(content)
    elif isinstance(content, RunResult):
        found = _run(content)
    elif isinstance(content, Tuning):
        found = _tuning(content)
    elif isinstance(content, Profile):
        found = _profile(content)
    else:
        assert isinstance(content, Judgement)
        found = _comparison(content)
    verdict, line, reasons = found
    return Part(kind=kind, verdict=verdict, line=line, reasons=reasons, source=document.source, taken=document.taken)


def _snapshot(found: Snapshot, drifted: Sequence[str]) -> Found:
    line = f"driver {found.driver}, CUDA {found.cuda_driver}, {_gpus(len(found.gpus))}"
    return ("WARN" if drifted else "RECORDED"), line, [f"not as in the certificate: {each}" for each in drifted]


def _gpus(count: int) -> str:
    return f"{count} GPU{'s'[: count != 1]}"


def _certificate(found: Certificate) -> Found:
    checks = f"{len(found.checks)} checks of the {found.tier} tier on {_gpus(len(found.snapshot.gpus))}"
    reasons = [f"{each.subject}: {each.code}: {each.message}" for each in found.findings]
    if not reasons and found.verdict != "PASS":
        reasons = [f"not seen: {each}" for each in found.unseen] or ["no check passed"]
    return found.verdict, checks, reasons


def _benchmark(found: ScoredRun) -> Found:
    score = found.score
    if score.output_tokens_per_s is None:
        failures = [f"{each.label}: {each.failure}" for each in score.devices if each.failure]
        return "FAIL", "no score", [*found.reasons, *failures]
    line = f"{number(score.output_tokens_per_s)} output tok/s sustained, {score.workload}, {score.model} {score.dtype}"
    reasons = [*found.reasons, *(f"ranks with nothing: {each}" for each in score.not_comparable)]
    if found.status == "partial" or found.verdict == "PARTIAL":
        return "UNKNOWN", line, ["it was cut short", *reasons]
    if found.verdict in ("FAILED", "SERVER_DIED"):
        return "FAIL", line, reasons or [found.verdict]
    health = [f"{each.label}: {reason}" for each in score.devices if each.health for reason in each.health.reasons]
    verdict = _HEALTH[score.health]
    if verdict == "PASS" and (score.not_comparable or found.verdict == "CLIENT_BOUND"):
        verdict = "WARN"
    return verdict, f"{line}, {score.health}", [*reasons, *(health if verdict != "PASS" else [])]


def _run(found: RunResult) -> Found:
    reasons = reasons_to_distrust(found)
    reasons += [f"{gate.name}: {gate.status}{f': {gate.detail}' * bool(gate.detail)}" for gate in found.gates
                if gate.status != "PASS"]  # fmt: skip
    if found.eval_score is not None:
        reasons += found.eval_score.zero_because
    reasons = list(dict.fromkeys(reasons))
    return _run_verdict(found, reasons), _run_line(found), reasons


def _run_verdict(found: RunResult, reasons: Sequence[str]) -> PartVerdict:
    if found.verdict in ("FAILED", "SERVER_DIED") or any(gate.status == "FAIL" for gate in found.gates):
        return "FAIL"
    if found.eval_score is not None and found.eval_score.zero_because:
        return "FAIL"
    if found.status == "partial" or found.verdict == "PARTIAL" or any(gate.status == "NOT RUN" for gate in found.gates):
        return "UNKNOWN"
    return "WARN" if reasons or found.verdict == "CLIENT_BOUND" else "PASS"


def _run_line(found: RunResult) -> str:
    lines = []
    if found.eval_score is not None:
        lines.append(eval_score_line(found.eval_score))
    elif found.speed_sum is not None:
        lines.append(speed_sum_line(found.speed_sum))
    if found.evaluation is not None:
        lines.append(evaluation_line(found.evaluation))
    if found.levels and not lines:
        best = max(found.levels, key=lambda level: level.output_tokens_per_s)
        lines.append(f"{number(best.output_tokens_per_s)} output tok/s, {load_of(best)}")
    if found.checks:
        passed = sum(check.status == "PASS" for check in found.checks)
        lines.append(f"API forms: {passed} of {len(found.checks)}")
    what = " ".join(
        str(each) for each in (found.command, found.settings.get("what"), found.settings.get("model")) if each
    )
    return f"{what}: {'; '.join(lines) or 'nothing measured'}"


def _tuning(found: Tuning) -> Found:
    line = f"tune {found.kind}: {found.finding}"
    return ("PASS", line, []) if found.answered else ("FAIL", line, ["no setting ran and kept to the limits"])


def _profile(found: Profile) -> Found:
    line = " ".join(f"GPU {report.device}: {gaps_headline(report)}" for report in found.reports)
    reasons = [f"GPU {report.device}: {reason}" for report in found.reports for reason in report.untrusted]
    return ("UNKNOWN" if reasons else "PASS"), line, reasons


def _comparison(found: Judgement) -> Found:
    line = f"{found.verdict}: {judge_headline(found)}"
    if found.doubts:
        return "UNKNOWN", line, [f"does not compare: {each}" for each in found.doubts]
    return _JUDGED[found.verdict], line, []  # the line says why
