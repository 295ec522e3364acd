"""From a probe's answers to rows and findings. Pure: nothing here touches a machine.

A row passes only on a usable figure at or above a known floor. Everything else has another word.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from meltcore.hardware import faults
from meltcore.hardware.expect import PRODUCT_FLOOR, power_limited, strictest, usable
from meltcore.hardware.measures import Answer
from meltcore.results.certificate import Expectation, Finding, Row, RowVerdict

# Healthy GPUs of one node lie within 4 % of each other (measured on H200 SXM, 2026-11-20), but for products: at the
# power limit cards of one kind lie as far apart as PRODUCT_FLOOR says.
STRAGGLER_SHARE = 0.93
STRAGGLERS_FROM = 3  # of two there is no telling which is the odd one
ASYMMETRY_SHARE = 0.90

# Expectations are at least 0.5 of a physical ceiling, so beyond this a figure is an error of measurement.
_IMPOSSIBLE_SHARE = 2.0

# A fault of the whole check rather than of one GPU: told once.
_TOLD_ONCE = {faults.TIMED_OUT, faults.PROBE_FAILED, faults.NO_EXPECTATION}
_SUBJECTS_NAMED = 4


@dataclass(frozen=True)
class Asked:
    """One figure to be had: whose it is, and what it should be. `recorded`: it is known that nothing is expected."""

    key: str
    gpus: tuple[int, ...]
    subject: str
    unit: str
    expectations: tuple[Expectation, ...] = ()
    recorded: bool = False


@dataclass
class Judged:
    """A row, and the fault code of its verdict where it has one."""

    row: Row
    code: str = ""

    def lower(self, verdict: RowVerdict, code: str, note: str) -> None:
        self.row.verdict, self.code, self.row.note = verdict, code, note


def judge(asked: Sequence[Asked], answers: Sequence[Answer], ended: tuple[str, str], busy: set[int]) -> list[Judged]:
    """`ended`: (fault code, words) for a figure that never came. `busy`: GPUs that another program used."""
    found = {(answer.key, answer.gpus): answer for answer in answers}
    judged = [_judge_one(one, found.get((one.key, one.gpus)), ended, busy) for one in asked]
    for group in _groups(judged, lambda row: row.key):
        _find_stragglers(group)
    _find_asymmetry(judged)
    return judged


def _judge_one(asked: Asked, answer: Answer | None, ended: tuple[str, str], busy: set[int]) -> Judged:
    row = Row(
        key=asked.key,
        subject=asked.subject,
        gpus=list(asked.gpus),
        unit=asked.unit,
        verdict="UNKNOWN",
        expectations=list(asked.expectations),
    )
    judged = Judged(row)
    if answer is None:
        judged.lower("UNKNOWN", *ended)
        return judged
    if answer.error or not answer.samples:
        judged.lower("UNKNOWN", faults.PROBE_FAILED, answer.error or "no sample came")
        return judged
    row.samples = [sample for sample in answer.samples if sample is not None and usable(sample)]
    _against_floor(judged, asked, [sample for sample in answer.samples if not usable(sample)])
    if busy & set(asked.gpus):
        judged.lower("INVALID", faults.BUSY, "another program was computing on it")
    return judged


def _against_floor(judged: Judged, asked: Asked, unusable: Sequence[float | None]) -> None:
    """One sample that is no speed makes the whole figure none: what went wrong there is not known."""
    row = judged.row
    floor = strictest(asked.expectations)
    if floor is not None:
        row.expected, row.floor, row.floor_set_by = floor.value, floor.floor, floor.source
    if unusable:
        words = "NaN or infinity" if unusable[0] is None else f"{unusable[0]:g}"
        judged.lower("UNKNOWN", faults.NO_READING, f"read {words}, which is no speed")
        return
    most = max((one.value for one in asked.expectations), default=max(row.samples))
    untimed = sum(sample > _IMPOSSIBLE_SHARE * most for sample in row.samples)
    if untimed:
        # A single one too: what its work did not wait for, the others may not have waited for either.
        samples = f"{untimed} of {len(row.samples)} samples"
        beyond = f"more than {_IMPOSSIBLE_SHARE:g} times the expected {figure(most)}"
        judged.lower("UNKNOWN", faults.NO_READING, f"{samples} are {beyond}, so something else was timed")
        return
    row.measured = median(row.samples)
    if floor is not None:
        row.share = row.measured / floor.value
        row.verdict = "PASS"
        if row.measured < floor.floor:
            judged.lower("FAIL", faults.BELOW_FLOOR, "")
    elif asked.recorded:
        row.verdict = "RECORDED"
    else:
        judged.lower("UNKNOWN", faults.NO_EXPECTATION, "nothing is known to hold it against")


def _groups(judged: Iterable[Judged], by: Callable[[Row], str]) -> list[list[Judged]]:
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        groups[by(one.row)].append(one)
    return list(groups.values())


def _find_stragglers(group: Sequence[Judged]) -> None:
    """Of the same figure on several GPUs or pairs: the ones that passed, and are yet far from the rest."""
    values = [one.row.measured for one in group if one.row.measured is not None]
    if len(values) < STRAGGLERS_FROM:
        return
    middle = median(values)
    for one in group:
        measured = one.row.measured
        least = (PRODUCT_FLOOR if power_limited(one.row.key) else STRAGGLER_SHARE) * middle
        if one.row.verdict == "PASS" and measured is not None and measured < least:
            one.lower("WARN", faults.STRAGGLER, f"{100 * measured / middle:.0f} % of the median of {len(values)}")


def _find_asymmetry(judged: Sequence[Judged]) -> None:
    """Pairs whose two directions differ, though each passed."""
    rows = {(one.row.key, tuple(one.row.gpus)): one for one in judged if len(one.row.gpus) == 2}
    for (key, (first, second)), one in rows.items():
        back = rows.get((key, (second, first)))
        if back is None or one.row.verdict != "PASS" or one.row.measured is None or back.row.measured is None:
            continue
        if one.row.measured < ASYMMETRY_SHARE * back.row.measured:
            share = 100 * one.row.measured / back.row.measured
            one.lower("WARN", faults.ASYMMETRY, f"{share:.0f} % of the other direction")


def throttle(judged: Sequence[Judged], slowed: set[int]) -> None:
    """A floor met while the clocks were held down is a WARN; the finding is the conditions' own."""
    for one in judged:
        if one.row.verdict == "PASS" and slowed & set(one.row.gpus):
            one.row.verdict = "WARN"
            one.row.note = "met while its clocks were held down"


def findings_of(check: str, judged: Sequence[Judged]) -> list[Finding]:
    """One finding a subject and code, in the words of its worst row; one in all where the whole check is at fault."""
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for one in judged:
        if one.code:
            groups[(one.code, "" if one.code in _TOLD_ONCE else _who(one.row))].append(one.row)
    return [
        Finding(
            code=code,
            verdict=rows[0].verdict,
            check=check,
            subject=_subjects(rows),
            message=_message(rows),
            action=faults.action(code, check),
        )
        for (code, _), rows in groups.items()
    ]


def _who(row: Row) -> str:
    return ",".join(map(str, sorted(row.gpus)))


def _subjects(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(row.subject for row in rows))
    more = len(names) - _SUBJECTS_NAMED
    if len({_who(row) for row in rows}) == 1:
        return names[0]
    return ", ".join(names[:_SUBJECTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def _message(rows: Sequence[Row]) -> str:
    worst = min(rows, key=lambda row: row.share if row.share is not None else 2.0)
    others = len(rows) - 1
    return f"{worst.key}: {_figure(worst)}" + (f"; and {others} more such figure{'s'[: others != 1]}" if others else "")


def _figure(row: Row) -> str:
    if row.verdict == "FAIL" and row.measured is not None and row.floor is not None and row.expected is not None:
        return (
            f"{figure(row.measured)} {row.unit} is under the floor of {figure(row.floor)} set by the "
            f"{row.floor_set_by} ({100 * row.measured / row.expected:.0f} % of {figure(row.expected)})"
        )
    value = f"{figure(row.measured)} {row.unit}, " if row.measured is not None else ""
    return value + row.note


def figure(value: float) -> str:
    """Three digits that count."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
