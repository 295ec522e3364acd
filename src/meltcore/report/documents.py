"""What the project's commands wrote, found by its content: every kind of document a page can be drawn of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import msgspec

from meltcore.errors import ConfigError
from meltcore.report.certificate_page import CERTIFICATE_PAGE
from meltcore.results.card import CARD_FILE, CARD_PAGE, CARD_VERSION, Card, PartKind
from meltcore.results.certificate import CERTIFICATE_FILE, Certificate, read_certificate
from meltcore.results.gaps import GAPS_FILE, GAPS_PAGE, GAPS_VERSION, Profile
from meltcore.results.judgement import JUDGEMENT_FILE, JUDGEMENT_VERSION, Judgement
from meltcore.results.runfolder import REPORT_FILE, REQUESTS_FILE, RESULT_FILE, read_result
from meltcore.results.schema import Fingerprint, RunResult
from meltcore.results.score import ScoredRun
from meltcore.results.snapshot import Snapshot, read_snapshot
from meltcore.results.tuning import TUNING_FILE, TUNING_VERSION, Tuning

Content = Snapshot | Certificate | RunResult | Tuning | Profile | Judgement | Card
SNAPSHOT_FILE = "snapshot.json"  # of `meltcore snapshot --json`, which makes no run folder
# In a folder, and the page that is drawn beside each.
PAGES = {
    CERTIFICATE_FILE: CERTIFICATE_PAGE,
    RESULT_FILE: REPORT_FILE,
    TUNING_FILE: REPORT_FILE,
    JUDGEMENT_FILE: REPORT_FILE,
    GAPS_FILE: GAPS_PAGE,
    CARD_FILE: CARD_PAGE,
}


@dataclass(frozen=True)
class Document:
    """`content` as read from `path`."""

    path: Path
    content: Content

    @property
    def source(self) -> str:
        """The name of its run folder; of a file that no run folder holds, its own."""
        return self.path.resolve().parent.name if self.path.name in PAGES else self.path.name

    @property
    def kind(self) -> PartKind | None:
        """None for a card, which is no part of another."""
        content = self.content
        if isinstance(content, ScoredRun):
            return "benchmark"
        if isinstance(content, RunResult):
            return "load" if content.command == "load" else "evaluation"
        kinds: dict[type, PartKind] = {
            Snapshot: "snapshot",
            Certificate: "certificate",
            Tuning: "tuning",
            Profile: "profile",
            Judgement: "comparison",
        }
        return kinds.get(type(content))

    @property
    def taken(self) -> str:
        content = self.content
        if isinstance(content, RunResult | Certificate):
            return content.started
        return content.fingerprint.taken if isinstance(content, Snapshot) else content.taken

    @property
    def fingerprint(self) -> Fingerprint | None:
        """The machine it is of; None where the document does not tell."""
        content = self.content
        if isinstance(content, Certificate):
            return content.snapshot.fingerprint
        return None if isinstance(content, Card) else content.fingerprint


def find_documents(path: Path) -> list[Document]:
    """Of a file, of a run folder, or of the run folders within a folder and a snapshot beside them. Raises ConfigError
    where there is none."""
    if path.is_file():
        return [read_document(path)]
    if not path.is_dir():
        raise ConfigError(f"there is no {path}")
    found = _within(path) or [file for folder in sorted(path.iterdir()) if folder.is_dir() for file in _within(folder)]
    found += [file for file in [path / SNAPSHOT_FILE] if file.is_file()]
    if not found:
        if (path / REQUESTS_FILE).exists():
            raise ConfigError(f"{path} holds no result: the run ended before it could write one")
        raise ConfigError(
            f"{path} holds nothing to report on: none of {', '.join([*PAGES, SNAPSHOT_FILE])}, nor has a folder in it"
        )
    return [read_document(file) for file in found]


def read_document(path: Path) -> Document:
    """Whatever kind it is. Raises ConfigError for a file of no kind, or of another version than this meltcore reads."""
    try:
        head = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    keys: set[str] = set(head) if isinstance(head, dict) else set()
    for needed, read in _READERS:
        if needed <= keys:
            return Document(path, read(path))
    raise ConfigError(f"{path} is nothing that a command of meltcore wrote")


def _within(folder: Path) -> list[Path]:
    return [folder / name for name in PAGES if (folder / name).is_file()]


def _read(path: Path, *, version: tuple[str, int], kind: type[msgspec.Struct]) -> Content:
    name, wanted = version
    try:
        found: Any = msgspec.json.decode(path.read_bytes(), type=kind)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} breaks its own form: {error}") from error
    if getattr(found, name) != wanted:
        raise ConfigError(f"{path} has {name} {getattr(found, name)}; this meltcore reads {wanted}")
    return cast(Content, found)


# The keys that tell a kind, the first that are all there.
_READERS: Sequence[tuple[set[str], Callable[[Path], Content]]] = (
    ({"card_version"}, partial(_read, version=("card_version", CARD_VERSION), kind=Card)),
    ({"tuning_version"}, partial(_read, version=("tuning_version", TUNING_VERSION), kind=Tuning)),
    ({"judgement_version"}, partial(_read, version=("judgement_version", JUDGEMENT_VERSION), kind=Judgement)),
    ({"gaps_version"}, partial(_read, version=("gaps_version", GAPS_VERSION), kind=Profile)),
    ({"schema_version", "tier", "checks"}, read_certificate),
    ({"schema_version", "topology"}, read_snapshot),
    ({"schema_version", "command"}, read_result),
)
