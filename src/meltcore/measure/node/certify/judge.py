"""Turns a probe's results into rows and findings. Pure functions: nothing here reads a machine.

A row passes only with a usable value at or above a known floor.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from meltcore.measure.documents.node import CertificateRow, Expectation, Finding
from meltcore.measure.documents.verdicts import CheckVerdict
from meltcore.measure.node.certify import faults
from meltcore.measure.node.certify.expectations import GEMM_FLOOR, is_power_limited, is_usable, strictest_expectation
from meltcore.measure.node.certify.faults import FaultCode
from meltcore.measure.node.certify.probe import ProbeResult

# Healthy GPUs of one node are within 4 % of each other (H200 SXM, 2026-11-20). GEMMs differ more: at the power limit
# GPUs of one type are as far apart as GEMM_FLOOR allows.
STRAGGLER_FRACTION = 0.93
MIN_STRAGGLER_GROUP = 3  # with two GPUs it is undecidable which one is the outlier
ASYMMETRY_FRACTION = 0.90

# Expectations are at least 0.5 of a physical ceiling, so a value beyond this multiple is a measurement error.
_IMPOSSIBLE_RATIO = 2.0

# Faults of a whole check rather than of one GPU: one finding for all rows.
_WHOLE_CHECK_FAULTS = {"TIMED_OUT", "PROBE_FAILED", "NO_EXPECTATION"}
_MAX_SUBJECTS = 4


@dataclass(frozen=True)
class Expected:
    """One planned metric with its expectations. A metric with `is_recorded` and without expectations is RECORDED."""

    key: str
    gpus: tuple[int, ...]
    subject: str
    unit: str
    expectations: tuple[Expectation, ...] = ()
    is_recorded: bool = False


@dataclass
class Judgment:
    """A row, and the fault code of its verdict if it has one."""

    row: CertificateRow
    code: FaultCode | None = None

    def set_verdict(self, verdict: CheckVerdict, code: FaultCode, note: str) -> None:
        """Set the verdict, its fault code and its note."""
        self.row.verdict, self.code, self.row.note = verdict, code, note


def judge(
    expected: Sequence[Expected], results: Sequence[ProbeResult], missing: tuple[FaultCode, str], busy: set[int]
) -> list[Judgment]:
    """Return one judgment per expected metric.

    `missing` is the (fault code, note) of a metric without a result. Another program used the GPUs in `busy`.
    """
    results_by_key = {(result.key, result.gpus): result for result in results}
    judgments = [
        _judge_one(metric, results_by_key.get((metric.key, metric.gpus)), missing, busy) for metric in expected
    ]
    groups: dict[str, list[Judgment]] = defaultdict(list)
    for judgment in judgments:
        groups[judgment.row.key].append(judgment)
    for group in groups.values():
        _find_stragglers(group)
    _find_asymmetry(judgments)
    return judgments


def _judge_one(
    expected: Expected, result: ProbeResult | None, missing: tuple[FaultCode, str], busy: set[int]
) -> Judgment:
    row = CertificateRow(
        key=expected.key,
        subject=expected.subject,
        gpus=list(expected.gpus),
        unit=expected.unit,
        verdict="UNKNOWN",
        expectations=list(expected.expectations),
    )
    judgment = Judgment(row)
    if result is None:
        judgment.set_verdict("UNKNOWN", *missing)
        return judgment
    if result.error or not result.samples:
        judgment.set_verdict("UNKNOWN", "PROBE_FAILED", result.error or "no sample")
        return judgment
    row.samples = [sample for sample in result.samples if sample is not None and is_usable(sample)]
    _compare_with_floor(judgment, expected, [sample for sample in result.samples if not is_usable(sample)])
    if busy & set(expected.gpus):
        judgment.set_verdict("INVALID", "BUSY", "another program was computing on it")
    return judgment


def _compare_with_floor(judgment: Judgment, expected: Expected, unusable: Sequence[float | None]) -> None:
    """Set the verdict from the floor. One unusable sample makes the metric UNKNOWN, as its cause may affect others."""
    row = judgment.row
    floor = strictest_expectation(expected.expectations)
    if floor is not None:
        row.expected, row.floor, row.floor_set_by = floor.value, floor.floor, floor.source
    if unusable:
        value = "NaN or infinity" if unusable[0] is None else f"{unusable[0]:g}"
        judgment.set_verdict("UNKNOWN", "NO_READING", f"measured {value}, which is not a speed")
        return
    highest = max((expectation.value for expectation in expected.expectations), default=max(row.samples))
    num_impossible = sum(sample > _IMPOSSIBLE_RATIO * highest for sample in row.samples)
    if num_impossible:
        # A single sample suffices: the others may have measured something else as well.
        samples = f"{num_impossible} of {len(row.samples)} samples"
        limit = f"more than {_IMPOSSIBLE_RATIO:g} times the expected {format_three_digits(highest)}"
        judgment.set_verdict("UNKNOWN", "NO_READING", f"{samples} are {limit}, so something else was timed")
        return
    row.measured = median(row.samples)
    if floor is not None:
        row.ratio = row.measured / floor.value
        row.verdict = "PASS"
        if row.measured < floor.floor:
            judgment.set_verdict("FAIL", "BELOW_FLOOR", "")
    elif expected.is_recorded:
        row.verdict = "RECORDED"
    else:
        judgment.set_verdict("UNKNOWN", "NO_EXPECTATION", "there is no expectation to compare it with")


def straggler_fraction(key: str) -> float:
    """Return the fraction of the median below which a GPU or node is a straggler in this metric."""
    return GEMM_FLOOR if is_power_limited(key) else STRAGGLER_FRACTION


def _find_stragglers(group: Sequence[Judgment]) -> None:
    """Change PASS to WARN in rows of one metric that are far below the median of all GPUs or pairs."""
    values = [judgment.row.measured for judgment in group if judgment.row.measured is not None]
    if len(values) < MIN_STRAGGLER_GROUP:
        return
    median_value = median(values)
    for judgment in group:
        measured = judgment.row.measured
        minimum = straggler_fraction(judgment.row.key) * median_value
        if judgment.row.verdict == "PASS" and measured is not None and measured < minimum:
            judgment.set_verdict(
                "WARN", "STRAGGLER", f"{100 * measured / median_value:.0f} % of the median of {len(values)}"
            )


def _find_asymmetry(judgments: Sequence[Judgment]) -> None:
    """Change PASS to WARN for pairs whose copies are slower than in the opposite direction."""
    pair_judgments = [judgment for judgment in judgments if len(judgment.row.gpus) == 2]
    pairs = {(judgment.row.key, tuple(judgment.row.gpus)): judgment for judgment in pair_judgments}
    for (key, (first, second)), judgment in pairs.items():
        opposite = pairs.get((key, (second, first)))
        if opposite is None or judgment.row.verdict != "PASS":
            continue
        measured, opposite_measured = judgment.row.measured, opposite.row.measured
        if measured is None or opposite_measured is None:
            continue
        if measured < ASYMMETRY_FRACTION * opposite_measured:
            percent = 100 * measured / opposite_measured
            judgment.set_verdict("WARN", "ASYMMETRY", f"{percent:.0f} % of the other direction")


def warn_throttled(judgments: Sequence[Judgment], throttled: set[int]) -> None:
    """Change PASS to WARN on throttled GPUs. ConditionsWatch makes the finding."""
    for judgment in judgments:
        if judgment.row.verdict == "PASS" and throttled & set(judgment.row.gpus):
            judgment.row.verdict = "WARN"
            judgment.row.note = "reached while its clocks were held down"


def make_findings(check: str, judgments: Sequence[Judgment]) -> list[Finding]:
    """Return one finding per fault code and set of GPUs, with the text of the worst row.

    A fault of the check itself, such as a crash, gives one finding in total.
    """
    groups: dict[tuple[FaultCode, str], list[CertificateRow]] = defaultdict(list)
    for judgment in judgments:
        if judgment.code:
            gpus = "" if judgment.code in _WHOLE_CHECK_FAULTS else _gpu_indices_key(judgment.row)
            groups[(judgment.code, gpus)].append(judgment.row)
    return [
        Finding(
            code=code,
            verdict=rows[0].verdict,
            check=check,
            subject=_subjects_text(rows),
            message=_message(rows),
            action=faults.fault_action(code, check),
        )
        for (code, _), rows in groups.items()
    ]


def _gpu_indices_key(row: CertificateRow) -> str:
    return ",".join(map(str, sorted(row.gpus)))


def _subjects_text(rows: Sequence[CertificateRow]) -> str:
    names = list(dict.fromkeys(row.subject for row in rows))
    num_more = len(names) - _MAX_SUBJECTS
    if len({_gpu_indices_key(row) for row in rows}) == 1:
        return names[0]
    return ", ".join(names[:_MAX_SUBJECTS]) + (f" and {num_more} more" if num_more > 0 else "")


def _message(rows: Sequence[CertificateRow]) -> str:
    row = min(rows, key=lambda row: row.ratio if row.ratio is not None else 2.0)
    num_others = len(rows) - 1
    if row.verdict == "FAIL" and row.measured is not None and row.floor is not None and row.expected is not None:
        measured, floor, expected = map(format_three_digits, (row.measured, row.floor, row.expected))
        text = (
            f"{measured} {row.unit} is below the floor of {floor} set by the {row.floor_set_by} "
            f"({100 * row.measured / row.expected:.0f} % of {expected})"
        )
    else:
        text = (f"{format_three_digits(row.measured)} {row.unit}, " if row.measured is not None else "") + row.note
    return f"{row.key}: {text}" + (f"; and {num_others} more metric{'s'[: num_others != 1]}" if num_others else "")


def format_three_digits(value: float) -> str:
    """Format a value with three significant digits, or as an integer from 100 on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
