"""Finds and opens the documents that meltcore's commands wrote, by their content."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from meltcore.common.errors import ConfigError
from meltcore.common.files import REQUESTS_FILE, read_document
from meltcore.measure.documents.backends import BackendComparison
from meltcore.measure.documents.card import CARD_FILE, CARD_PAGE, Card, EvidenceType
from meltcore.measure.documents.comparison import COMPARISON_FILE, ComparisonResult
from meltcore.measure.documents.gaps import GAPS_FILE, GAPS_PAGE, GpuProfile
from meltcore.measure.documents.node import CERTIFICATE_FILE, CERTIFICATE_PAGE, Certificate, Snapshot
from meltcore.measure.documents.runfolder import REPORT_FILE, RESULT_FILE
from meltcore.measure.documents.schema import Fingerprint, FleetLoad, RunResult
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.tuning import TUNING_FILE, Tuning

Content = (
    Snapshot | Certificate | RunResult | Tuning | GpuProfile | ComparisonResult | BackendComparison | Card | FleetLoad
)
DOCUMENT_TYPES = (
    *(Snapshot, Certificate, RunResult, ScoredRun, Tuning, GpuProfile, ComparisonResult, BackendComparison, Card),
    FleetLoad,
)
SNAPSHOT_FILE = "snapshot.json"  # of `meltcore snapshot --json`, which makes no run folder
# The documents of run folders, and the page beside each.
PAGE_FILES = {
    CERTIFICATE_FILE: CERTIFICATE_PAGE,
    RESULT_FILE: REPORT_FILE,
    TUNING_FILE: REPORT_FILE,
    COMPARISON_FILE: REPORT_FILE,
    GAPS_FILE: GAPS_PAGE,
    CARD_FILE: CARD_PAGE,
}


@dataclass(frozen=True)
class DocumentFile:
    """A document that was read from `path`, with its parsed `content`."""

    path: Path
    content: Content

    @property
    def source(self) -> str:
        """The name of the document's run folder, or of its file outside a run folder."""
        return self.path.resolve().parent.name if self.path.name in PAGE_FILES else self.path.name

    @property
    def type(self) -> EvidenceType | None:
        """The document's type of evidence. It is None for a card and for a sweep, which are not evidence."""
        tag = str(self.content.__struct_config__.tag)
        if tag == "run" and isinstance(self.content, RunResult):
            return "load" if self.content.command == "load" else "evaluation"
        if isinstance(self.content, ScoredRun):
            return "benchmark" if self.content.score.grid is None else None
        return next((name for name in get_args(EvidenceType) if name == tag), None)

    @property
    def taken(self) -> str:
        """The time of the document in ISO 8601, or "" if it has none."""
        content = self.content
        if isinstance(content, Certificate):
            return content.started
        return content.fingerprint.taken if isinstance(content, Snapshot) else content.taken

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The fingerprint of the measured machine, or None if the document has none."""
        content = self.content
        if isinstance(content, Certificate):
            return content.snapshot.fingerprint
        return None if isinstance(content, Card) else content.fingerprint


def find_documents(path: Path) -> list[DocumentFile]:
    """Read the documents of a file, a run folder, or a folder of run folders and a snapshot.

    Raises ConfigError if there is no document.
    """
    if path.is_file():
        return [open_document(path)]
    if not path.is_dir():
        raise ConfigError(f"there is no {path}")
    files = _page_files(path) or [
        file for folder in sorted(path.iterdir()) if folder.is_dir() for file in _page_files(folder)
    ]
    files += [file for file in [path / SNAPSHOT_FILE] if file.is_file()]
    if not files:
        if (path / REQUESTS_FILE).exists():
            raise ConfigError(f"{path} holds no result: the run ended before it could write one")
        raise ConfigError(
            f"{path} holds nothing to report on: none of {', '.join([*PAGE_FILES, SNAPSHOT_FILE])}, nor has a folder "
            "in it"
        )
    return [open_document(file) for file in files]


def open_document(path: Path) -> DocumentFile:
    """Read a document of any type from its file. Raises ConfigError for a file that is no valid document."""
    return DocumentFile(path, cast(Content, read_document(path, *DOCUMENT_TYPES)))


def _page_files(folder: Path) -> list[Path]:
    return [folder / name for name in PAGE_FILES if (folder / name).is_file()]
