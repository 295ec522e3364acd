"""The folder of one run: `requests.jsonl` streams while it runs, `result.json` and `report.html` come whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from meltcore.errors import ConfigError
from meltcore.results.schema import SCHEMA_VERSION, RunResult
from meltcore.results.score import ScoredRun

REQUESTS_FILE = "requests.jsonl"
RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
SCORING_COMMAND = "bench"  # its results are ScoredRun
_NAMES_TO_TRY = 100  # runs of one verb within one second


@dataclass(frozen=True)
class RunFolder:
    """An existing folder `<UTC time>-<verb>`."""

    path: Path

    @classmethod
    def create(cls, root: Path | str, verb: str) -> "RunFolder":
        """Make a fresh folder under `root`, which is made where missing. Raises ConfigError where that cannot be."""
        base = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{verb}"
        for attempt in range(_NAMES_TO_TRY):
            path = Path(root) / (base if attempt == 0 else f"{base}-{attempt + 1}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"cannot make the run folder {path}: {error.strerror}") from error
            return cls(path)
        raise ConfigError(f"{root} already holds {_NAMES_TO_TRY} runs named {base}")

    @classmethod
    @contextmanager
    def kept_if_used(cls, root: Path | str, verb: str) -> "Iterator[RunFolder]":
        """A fresh folder as of `create`; an error that leaves it empty takes it away, and a new `root` with it."""
        is_new = not Path(root).exists()
        folder = cls.create(root, verb)
        try:
            yield folder
        except BaseException:
            if not any(folder.path.iterdir()):
                folder.path.rmdir()
                if is_new:
                    Path(root).rmdir()
            raise

    @property
    def requests_path(self) -> Path:
        """Where the load generator streams one JSON line a request."""
        return self.path / REQUESTS_FILE

    @property
    def result_path(self) -> Path:
        return self.path / RESULT_FILE

    @property
    def report_path(self) -> Path:
        return self.path / REPORT_FILE

    def write_result(self, result: RunResult) -> Path:
        write_whole(self.result_path, msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
        return self.result_path

    def write_report(self, html: str) -> Path:
        write_whole(self.report_path, html.encode())
        return self.report_path


def read_result(folder: Path | str) -> RunResult:
    """The result of a run folder (or of a path to its result.json); a ScoredRun where `meltcore bench` wrote it.

    Raises ConfigError for no result, one that is not ours, or one of another schema version.
    """
    path = Path(folder)
    if path.is_dir():
        path = path / RESULT_FILE
    try:
        text = path.read_bytes()
    except OSError as error:
        hint = "; the run ended before it could write one" if path.with_name(REQUESTS_FILE).exists() else ""
        raise ConfigError(f"cannot read {path}: {error.strerror}{hint}") from error
    return _decode(text, path)


def _decode(text: bytes, path: Path) -> RunResult:
    try:
        head = msgspec.json.decode(text, type=_Head)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} is no meltcore result: {error}") from error
    version = head.schema_version
    if version != SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has result schema version {version}; this meltcore reads version {SCHEMA_VERSION}. "
            f"Read it with the meltcore that wrote it"
        )
    try:
        return msgspec.json.decode(text, type=ScoredRun if head.command == SCORING_COMMAND else RunResult)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} breaks result schema version {version}: {error}") from error


class _Head(msgspec.Struct):
    schema_version: int
    command: str = ""


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, sync, rename, sync the folder: a crash leaves the old file or the new one, never half of one."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
