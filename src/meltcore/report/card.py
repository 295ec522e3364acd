"""Joins documents to a card: the newest of each kind, all of one machine; the gravest verdict is the card's."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from meltcore.errors import ConfigError
from meltcore.report.card_parts import part_of
from meltcore.report.documents import Document
from meltcore.report.story import stories
from meltcore.results.card import MADE_BY, Card, Part, PartKind
from meltcore.results.certificate import Certificate, Verdict, worst
from meltcore.results.gaps import Profile
from meltcore.results.judgement import Judgement
from meltcore.results.schema import RunResult
from meltcore.results.score import ScoredRun
from meltcore.results.snapshot import Snapshot
from meltcore.results.tuning import Tuning
from meltcore.results.wording import counted

_ORDER: list[PartKind] = [*MADE_BY, "load"]


def newest(documents: Sequence[Document]) -> tuple[list[Document], list[Document]]:
    """(those that count, those that a newer one stands for), both in the order of a card's parts."""
    by_subject: dict[tuple[str, ...], list[Document]] = {}
    for each in documents:
        if each.kind is not None:
            by_subject.setdefault(_subject(each), []).append(each)
    ranked = [sorted(own, key=_moment, reverse=True) for own in by_subject.values()]
    return _in_order([own[0] for own in ranked]), _in_order([each for own in ranked for each in own[1:]])


def snapshots_apart(documents: Sequence[Document]) -> tuple[Snapshot, Snapshot] | None:
    """The certificate's snapshot and the one taken alone, the older first; None where one of them is not there."""
    dated: dict[str, tuple[datetime, Snapshot]] = {}
    for each in documents:
        if isinstance(each.content, Certificate):
            dated["certificate"] = _moment(each), each.content.snapshot
        elif isinstance(each.content, Snapshot):
            dated["snapshot"] = _moment(each), each.content
    if len(dated) < 2:
        return None
    (_, old), (_, new) = sorted(dated.values(), key=lambda pair: pair[0])
    return old, new


def make_card(
    documents: Sequence[Document],
    earlier: Sequence[Document] = (),
    *,
    drifted: Sequence[str] = (),
    force: bool = False,
) -> Card:
    """`documents` count and `earlier` ones are named, as `newest` divides them; `drifted` lies between the snapshots.

    Raises ConfigError for documents of several machines, unless `force`; such a card is UNKNOWN at best.
    """
    doubts = machines_apart(documents)
    if doubts and not force:
        raise ConfigError(f"these are not of one machine: {'; '.join(doubts)}. --force joins them all the same")
    parts = [part_of(each, drifted if each.kind == "snapshot" else ()) for each in documents]
    contents = [each.content for each in documents]
    tunings = [each for each in contents if isinstance(each, Tuning)]
    comparisons = [each for each in contents if isinstance(each, Judgement)]
    missing = [kind for kind in MADE_BY if all(part.kind != kind for part in parts)]
    verdict = overall(parts, doubts)
    return Card(
        verdict=verdict,
        why=_why(verdict, parts, missing, doubts),
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine(documents),
        parts=parts,
        missing=missing,
        earlier=[f"{each.kind} of {each.source}" for each in earlier],
        doubts=doubts,
        stories=stories(tunings, comparisons),
        snapshot=next((each for each in contents if isinstance(each, Snapshot)), None),
        certificate=next((each for each in contents if isinstance(each, Certificate)), None),
        benchmark=next((each for each in contents if isinstance(each, ScoredRun)), None),
        runs=[each for each in contents if isinstance(each, RunResult) and not isinstance(each, ScoredRun)],
        tunings=tunings,
        profiles=[each for each in contents if isinstance(each, Profile)],
        comparisons=comparisons,
    )


def overall(parts: Sequence[Part], doubts: Sequence[str] = ()) -> Verdict:
    """The gravest; UNKNOWN where nothing was judged, or it may not be of one machine and nothing failed."""
    verdict = worst([part.verdict for part in parts])
    if verdict == "FAIL":
        return "FAIL"
    if doubts or verdict not in ("WARN", "PASS"):
        return "UNKNOWN"
    return "WARN" if verdict == "WARN" else "PASS"


def machines_apart(documents: Sequence[Document]) -> list[str]:
    """What each machine is of, where there are several; a document that does not tell its machine is of any."""
    machines: dict[tuple[str, ...], list[str]] = {}
    for each in documents:
        if each.fingerprint is not None:
            found = each.fingerprint
            # GPUs make the machine; memory and cores may be what a container was given that day.
            key = tuple(sorted(gpu.uuid for gpu in found.gpus)) or (found.cpu,)
            machines.setdefault(key, []).append(f"{each.kind} of {each.source}")
    if len(machines) < 2:
        return []
    return [f"{', '.join(names)}: {' '.join(key)}" for key, names in machines.items()]


def _subject(document: Document) -> tuple[str, ...]:
    """Documents of one subject stand for each other, and the newest counts."""
    content, kind = document.content, str(document.kind)
    if isinstance(content, Judgement):
        return kind, content.old_command, content.new_command, content.primary.name
    if isinstance(content, Tuning):
        return kind, content.kind, content.command, str(content.load.get("workload"))
    if isinstance(content, RunResult) and not isinstance(content, ScoredRun):
        return kind, content.command, *(str(content.settings.get(name)) for name in ("what", "model", "workload"))
    return (kind,)


def _moment(document: Document) -> datetime:
    """A document that does not tell is older than all others."""
    if not document.taken:
        return datetime.min.replace(tzinfo=UTC)
    return datetime.fromisoformat(document.taken).astimezone(UTC)


def _in_order(documents: Sequence[Document]) -> list[Document]:
    return sorted(documents, key=lambda each: (_ORDER.index(each.kind) if each.kind else -1, _moment(each)))


def _machine(documents: Sequence[Document]) -> str:
    """The GPUs by name, those of the certificate or snapshot first; the CPU where there is none."""
    for each in documents:
        if isinstance(each.content, Certificate | Snapshot):
            state = each.content if isinstance(each.content, Snapshot) else each.content.snapshot
            if state.gpus:
                return counted([gpu.name for gpu in state.gpus])
    known = [each.fingerprint for each in documents if each.fingerprint is not None]
    if not known:
        return "a machine that none of these tells"
    return counted([gpu.name for gpu in known[0].gpus]) or known[0].cpu


def _why(verdict: Verdict, parts: Sequence[Part], missing: Sequence[PartKind], doubts: Sequence[str]) -> str:
    """Whose verdict it is, and what was not looked at."""
    grave = [part for part in parts if part.verdict == verdict]
    seen = f"{len(MADE_BY) - len(missing)} of {len(MADE_BY)} kinds of evidence"
    not_seen = f" Not looked at: {', '.join(missing)}." if missing else ""
    if verdict == "PASS":
        return f"Nothing speaks against this node in {seen}.{not_seen}"
    names = ", ".join(dict.fromkeys(f"{part.kind} ({part.source})" for part in grave))
    because = f"Because of {names}" if names else "Nothing here is judged"
    if doubts and verdict == "UNKNOWN":
        because = "These are not of one machine"
    return f"{because}; {seen}.{not_seen}"
