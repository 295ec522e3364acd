"""The sections of a demo's page with conversations, and with some translations and transcriptions."""

from __future__ import annotations

from collections.abc import Sequence

from meltcore.measure.documents.schema import DemoSample
from meltcore.measure.report.page.page import Audio, Block, Cell, Column, Row, Section, Table


def conversations_section(samples: Sequence[DemoSample]) -> Section:
    """Build a table of what was asked in chats, and of the answers."""
    rows = [Row([sample.given, sample.answer]) for sample in samples if sample.task is None]
    columns = [Column(head, align="text") for head in ("Question", "Answer")]
    return Section("Conversations", [Table(columns, rows)] if rows else [])


def samples_section(samples: Sequence[DemoSample]) -> Section:
    """Build a table of the translations, and a player with the transcript of each clip."""
    texts = [sample for sample in samples if sample.audio_wav is None and sample.task is not None]
    rows = [Row([sample.given, sample.answer, _result_cell(sample)]) for sample in texts]
    columns = [*(Column(head, align="text") for head in ("Sentence", "Translation")), Column("Right")]
    blocks: list[Block] = [Table(columns, rows)] if rows else []
    for sample in samples:
        if sample.audio_wav is not None:
            note = "" if _is_right(sample) else f"not right; expected: {sample.expected}"
            blocks.append(Audio(sample.given, sample.audio_wav, sample.answer, note))
    return Section("Translations and transcripts", blocks)


def _is_right(sample: DemoSample) -> bool:
    return sample.expected is None or sample.answer.strip() == sample.expected.strip()


def _result_cell(sample: DemoSample) -> Cell:
    return Cell("yes") if _is_right(sample) else Cell("no", "warning", title=f"expected: {sample.expected}")
