"""Builds a report card with one verdict from the newest documents of one machine, and the page of the card."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.card import CARD_FILE, COMMANDS, REQUIRED, Card, Evidence, EvidenceType
from meltcore.measure.documents.comparison import ComparisonResult
from meltcore.measure.documents.gaps import GpuProfile
from meltcore.measure.documents.node import Certificate, Snapshot
from meltcore.measure.documents.schema import Fingerprint, RunResult
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.served_model import model_text
from meltcore.measure.documents.tuning import Tuning
from meltcore.measure.documents.values.documents import DocumentFile
from meltcore.measure.documents.values.formatting import format_counts, format_number, format_time
from meltcore.measure.documents.values.scores import expectations
from meltcore.measure.documents.verdicts import CheckVerdict, style_of, worst_verdict
from meltcore.measure.report.comparisons.comparison import side_names, starts_chart, starts_line
from meltcore.measure.report.comparisons.tuning import tuning_figure
from meltcore.measure.report.load.levels import load_charts
from meltcore.measure.report.load.run import machine_section, run_tiles
from meltcore.measure.report.nodes.certificate import certificate_charts, certificate_tiles
from meltcore.measure.report.nodes.evidence import build_stories, evidence_of
from meltcore.measure.report.nodes.profile import profile_headline, window_bar, window_legend
from meltcore.measure.report.page.page import (
    Block,
    Box,
    Cell,
    Column,
    Figure,
    Figures,
    Page,
    Row,
    Section,
    Table,
    Text,
    Tiles,
    verdict_cell,
)
from meltcore.measure.report.scores.score import expectation_blocks, score_charts, score_tiles

_MAX_CHARTS = 2  # of a run: throughput and time to first token; its own page has the others
_MAX_REASONS = 6
_TYPE_ORDER: list[EvidenceType] = list(COMMANDS)


def newest_documents(documents: Sequence[DocumentFile]) -> tuple[list[DocumentFile], list[DocumentFile]]:
    """Return the newest document of each subject, and all older documents, in the order of a card's evidence."""
    by_subject: dict[tuple[str, ...], list[DocumentFile]] = {}
    for document in sorted(documents, key=_document_time, reverse=True):
        if document.type is not None:
            by_subject.setdefault(_subject_key(document), []).append(document)
    newest = [subject_documents[0] for subject_documents in by_subject.values()]
    older = [document for subject_documents in by_subject.values() for document in subject_documents[1:]]
    return sorted(newest, key=_evidence_order), sorted(older, key=_evidence_order)


def _evidence_order(document: DocumentFile) -> tuple[int, datetime]:
    """Return the sort key of a card's evidence: the type's place in `COMMANDS`, then the time."""
    assert document.type is not None, "only documents with a type are evidence"
    return _TYPE_ORDER.index(document.type), _document_time(document)


def conflicting_snapshots(documents: Sequence[DocumentFile]) -> tuple[Snapshot, Snapshot] | None:
    """Return the certificate's snapshot and the separate snapshot, the older first, or None if either is missing."""
    by_time = {
        document.type: (
            _document_time(document),
            document.content.snapshot if isinstance(document.content, Certificate) else document.content,
        )
        for document in documents
        if isinstance(document.content, Certificate | Snapshot)
    }
    if len(by_time) < 2:
        return None
    (_, old_snapshot), (_, new_snapshot) = sorted(by_time.values(), key=lambda time_and_snapshot: time_and_snapshot[0])
    return old_snapshot, new_snapshot


def build_card(
    documents: Sequence[DocumentFile],
    older_documents: Sequence[DocumentFile] = (),
    *,
    changed_facts: Sequence[str] = (),
    required: Sequence[EvidenceType] = REQUIRED,
    force: bool = False,
) -> Card:
    """Build a card from `documents`.

    The card lists `older_documents` by name, and `changed_facts` between two snapshots. If a type of `required` is
    missing, the verdict is INCOMPLETE or worse. Raises ConfigError for documents of several machines. With `force`
    there is a card, whose verdict is UNKNOWN or FAIL.
    """
    machine_mismatches = _find_machine_mismatches(documents)
    if machine_mismatches and not force:
        raise ConfigError(
            f"these are not of one machine: {'; '.join(machine_mismatches)}. --force joins them all the same"
        )
    evidence = [evidence_of(document, changed_facts if document.type == "snapshot" else ()) for document in documents]
    missing_types = [type_name for type_name in required if all(item.type != type_name for item in evidence)]
    verdict = _overall_verdict(evidence, missing_types, machine_mismatches)
    contents = [document.content for document in documents]
    tunings = [content for content in contents if isinstance(content, Tuning)]
    comparisons = [content for content in contents if isinstance(content, ComparisonResult)]
    return Card(
        verdict=verdict,
        reason=_reason(verdict, evidence, required, missing_types, machine_mismatches),
        taken=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine_name(documents),
        evidence=evidence,
        missing=missing_types,
        required=list(required),
        superseded=[f"{document.type} of {document.source}" for document in older_documents],
        doubts=machine_mismatches,
        stories=build_stories(tunings, comparisons),
        snapshot=next((content for content in contents if isinstance(content, Snapshot)), None),
        certificate=next((content for content in contents if isinstance(content, Certificate)), None),
        benchmark=next((content for content in contents if isinstance(content, ScoredRun)), None),
        runs=[content for content in contents if isinstance(content, RunResult) and not isinstance(content, ScoredRun)],
        tunings=tunings,
        profiles=[content for content in contents if isinstance(content, GpuProfile)],
        comparisons=comparisons,
    )


def _overall_verdict(
    evidence: Sequence[Evidence], missing_types: Sequence[EvidenceType], machine_mismatches: Sequence[str]
) -> CheckVerdict:
    """Return the worst verdict of the evidence, in the order FAIL, UNKNOWN, INCOMPLETE, WARN, PASS.

    The verdict is UNKNOWN if nothing was judged, or if the documents may be of several machines.
    """
    verdict = worst_verdict([item.verdict for item in evidence], "UNKNOWN")
    if verdict == "FAIL":
        return "FAIL"
    if machine_mismatches or verdict not in ("WARN", "PASS"):
        return "UNKNOWN"
    return "INCOMPLETE" if missing_types else "WARN" if verdict == "WARN" else "PASS"


def _find_machine_mismatches(documents: Sequence[DocumentFile]) -> list[str]:
    """Return one line per machine with its documents if there are several machines, else an empty list.

    A document without a fingerprint causes no mismatch.
    """
    machines: dict[tuple[str, ...], list[str]] = {}
    for document in documents:
        if document.fingerprint is not None:
            # GPUs identify the machine; memory and cores may be what a container was given that day.
            key = tuple(sorted(gpu.uuid for gpu in document.fingerprint.gpus)) or (document.fingerprint.cpu,)
            machines.setdefault(key, []).append(f"{document.type} of {document.source}")
    machine_items = machines.items() if len(machines) > 1 else ()
    return [f"{', '.join(document_names)}: {' '.join(key)}" for key, document_names in machine_items]


def _subject_key(document: DocumentFile) -> tuple[str, ...]:
    """Return the key of a document's subject. A card uses only the newest document per subject."""
    content, name = document.content, str(document.type)
    if isinstance(content, ComparisonResult):
        return name, content.old_command, content.new_command, content.primary.name
    if isinstance(content, Tuning):
        return name, content.kind, content.command, str(content.load.get("workload"))
    if isinstance(content, RunResult) and not isinstance(content, ScoredRun):
        return name, content.command, *(str(content.settings.get(setting)) for setting in ("what", "model", "workload"))
    return (name,)


def _document_time(document: DocumentFile) -> datetime:
    """Return the time of a document in UTC; a document without a time is older than all others."""
    if not document.taken:
        return datetime.min.replace(tzinfo=UTC)
    return datetime.fromisoformat(document.taken).astimezone(UTC)


def _machine_name(documents: Sequence[DocumentFile]) -> str:
    """Return the GPU names of the certificate or snapshot, else of the first fingerprint.

    Without GPUs, return its CPU.
    """
    for document in documents:
        if isinstance(document.content, Certificate | Snapshot):
            snapshot = document.content if isinstance(document.content, Snapshot) else document.content.snapshot
            if snapshot.gpus:
                return format_counts([gpu.name for gpu in snapshot.gpus])
    fingerprints = [document.fingerprint for document in documents if document.fingerprint is not None]
    if not fingerprints:
        return "a machine that no document names"
    return format_counts([gpu.name for gpu in fingerprints[0].gpus]) or fingerprints[0].cpu


def _reason(
    verdict: CheckVerdict,
    evidence: Sequence[Evidence],
    required: Sequence[EvidenceType],
    missing_types: Sequence[EvidenceType],
    machine_mismatches: Sequence[str],
) -> str:
    """Return a sentence with the documents that decided the verdict and the missing required evidence."""
    evidence_count = f"{len(required) - len(missing_types)} of {len(required)} required types of evidence"
    missing_note = f" Missing: {', '.join(missing_types)}." if missing_types else ""
    if verdict == "PASS":
        return f"Nothing speaks against this node in {evidence_count}."
    if verdict == "INCOMPLETE":
        return f"Nothing failed, but only {evidence_count} are there.{missing_note}"
    names = ", ".join(dict.fromkeys(f"{item.type} ({item.source})" for item in evidence if item.verdict == verdict))
    cause = f"Because of {names}" if names else "Nothing here is judged"
    if machine_mismatches and verdict == "UNKNOWN":
        cause = "These are not of one machine"
    return f"{cause}; {evidence_count}.{missing_note}"


def card_page(card: Card) -> Page:
    """Build the page: the verdict, one row per document, the changed settings, and the charts of each document."""
    style = style_of(card.verdict)
    rows = [Row([item.type, verdict_cell(item.verdict), _summary_cell(item)]) for item in card.evidence]
    rows += [
        Row([name, Cell("MISSING", "plain", tag=True), Cell(f"required, and not there: {COMMANDS[name]}", "faint")])
        for name in card.missing
    ]
    note = f"A newer one replaces each of these: {', '.join(card.superseded)}." if card.superseded else ""
    columns = [Column("Evidence"), Column("Verdict", align="left"), Column("What it says", align="text")]
    mismatch_box = Box("bad", "These are not of one machine", items=card.doubts)
    story_boxes: list[Block] = [
        Box(
            style_of(story.state),
            story.change,
            items=[line for line in (story.tuned, story.compared) if line],
            small_print=f"On {story.workload}" if story.workload else "",
            tag=story.state,
        )
        for story in card.stories
    ]
    sections = [
        Section(blocks=[Box(style, lead=card.reason, console=False), *([mismatch_box] if mismatch_box.items else [])]),
        Section("Evidence", [Table(columns, rows, note, is_stacked=True)]),
        Section("Perf story: which setting changed, and what it gave", story_boxes),
        *_perf_story_sections(card),
        *_certificate_sections(card),
        *_benchmark_and_run_sections(card),
        *(
            Section(
                f"Where the time of GPU {report.device} went",
                [
                    Text(profile_headline(report), "lead"),
                    Figure(profile.source, window_bar(report), window_legend(report)),
                ],
                console=False,
            )
            for profile in card.profiles
            for report in profile.reports
        ),
        machine_section(_newest_fingerprint(card)),
    ]
    return Page(
        title=f"{card.verdict} – {card.machine} – meltcore report card",
        name="report card",
        subtitle=f"{card.machine} · {format_time(card.taken)}",
        badge=card.verdict,
        style=style,
        sections=[section for section in sections if section.blocks],
        footer="meltcore report · the same, and every number behind it, stands in "
        f"{CARD_FILE} · exit status {card.exit_code}",
        conclusion=card.reason,
    )


def _summary_cell(item: Evidence) -> Cell:
    num_hidden = len(item.reasons) - _MAX_REASONS
    reasons = [*item.reasons[:_MAX_REASONS], *([f"and {num_hidden} more"] if num_hidden > 0 else [])]
    return Cell(
        item.summary,
        items=reasons,
        small_print=" · ".join([item.source, *([format_time(item.taken)] if item.taken else [])]),
    )


def _perf_story_sections(card: Card) -> list[Section]:
    """Build the sections with the evidence of the stories: the starts of comparisons and the charts of tunings."""
    sections = []
    for comparison in card.comparisons:
        note = (
            f"A dot is one fresh start, the bar their mean; {comparison.primary.better} is better. "
            f"{starts_line(comparison)}"
        )
        chart = Figure(comparison.primary.name, starts_chart(comparison), note=note)
        old_name, new_name = side_names(comparison)
        commands = [(comparison.old_name, comparison.old_command), (comparison.new_name, comparison.new_command)]
        blocks: list[Block] = [
            chart,
            *(Text(f"{name} is: {command}", "small") for name, command in commands if command),
        ]
        sections.append(Section(f"Comparison: {old_name} against {new_name}", blocks, console=False))
    for tuning in card.tunings:
        figure = tuning_figure(tuning)
        facts = Tiles([(fact.name, fact.value, fact.source) for fact in tuning.facts])
        blocks = [Text(tuning.finding, "lead"), facts] if figure is None and tuning.facts else []
        blocks += [figure] if figure is not None else []
        lines = [*tuning.notes, f"Server: {tuning.command}"] if blocks else []
        blocks += [Text(line, "small") for line in lines]
        sections += [Section(f"Tuning: {tuning.kind}", blocks, console=False)]
    return sections


def _certificate_sections(card: Card) -> list[Section]:
    if card.certificate is None:
        return []
    figures = Figures(certificate_charts(card.certificate), is_full_width=True)
    return [Section("Certificate", [Tiles(certificate_tiles(card.certificate)), figures], console=False)]


def _benchmark_and_run_sections(card: Card) -> list[Section]:
    sections = []
    if card.benchmark is not None:
        score = card.benchmark.score
        is_unstable = any(item.name == "throughput" and item.verdict == "FAIL" for item in expectations(score))
        unit = "output tokens/s" + (", not stable" if is_unstable else " sustained")
        rate = ("Score", format_number(score.output_tokens_per_s), unit)
        figures = Figures(score_charts(score.devices)[:_MAX_CHARTS])
        model = model_text({"model": score.model, "weights": score.weights})
        blocks: list[Block] = [Tiles([rate, *score_tiles(score)]), *expectation_blocks(score), figures]
        sections.append(Section(f"GPU score: {model}", blocks, console=False))
    for run in card.runs:
        subject_text = " ".join(
            str(part) for part in (run.command, run.settings.get("what"), model_text(run.settings)) if part
        )
        title = f"{'Load' if run.command == 'load' else 'Evaluation'}: {subject_text}"
        figures = Figures(load_charts(run.levels)[:_MAX_CHARTS])
        sections.append(Section(title, [Tiles(run_tiles(run)), figures], console=False))
    return sections


def _newest_fingerprint(card: Card) -> Fingerprint | None:
    """Return the fingerprint of the certificate or snapshot, else of the newest measurement, or None."""
    if card.certificate is not None:
        return card.certificate.snapshot.fingerprint
    if card.snapshot is not None:
        return card.snapshot.fingerprint
    benchmark = [] if card.benchmark is None else [card.benchmark]
    documents: list[Any] = [*card.runs, *card.tunings, *card.comparisons, *card.profiles, *benchmark]
    fingerprints = [document.fingerprint for document in documents if document.fingerprint is not None]
    return max(fingerprints, key=lambda fingerprint: fingerprint.taken, default=None)
