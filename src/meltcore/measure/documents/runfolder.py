"""Manages the folder of one run.

`requests.jsonl` is streamed; `result.json` and `report.html` are written at the end.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from meltcore.common.errors import ConfigError
from meltcore.common.files import REQUESTS_FILE, read_document, write_document
from meltcore.measure.documents.schema import FleetLoad, RunResult
from meltcore.measure.documents.score import ScoredRun

RESULT_FILE = "result.json"
REPORT_FILE = "report.html"
_MAX_NAMES = 100  # runs of one verb within one second


@dataclass(frozen=True)
class RunFolder:
    """The existing folder of a run. Its name is `<UTC time>-<verb>`."""

    path: Path

    @classmethod
    def create(cls, root: Path | str, verb: str) -> "RunFolder":
        """Create and return a new folder under `root`. Creates `root` too if it is missing.

        Raises ConfigError on failure.
        """
        folder_name = f"{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{verb}"
        for attempt in range(_MAX_NAMES):
            path = Path(root) / (folder_name if attempt == 0 else f"{folder_name}-{attempt + 1}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ConfigError(f"cannot create the run folder {path}: {error.strerror}") from error
            return cls(path)
        raise ConfigError(f"{root} already holds {_MAX_NAMES} runs named {folder_name}")

    @classmethod
    @contextmanager
    def create_or_remove(cls, root: Path | str, verb: str) -> "Iterator[RunFolder]":
        """Create a folder as `create` does, and yield it.

        If the block raises an error, an empty folder is removed, and so is a `root` that this call created.
        """
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
        """The path of `requests.jsonl`, to which the load generator streams one JSON line per request."""
        return self.path / REQUESTS_FILE

    @property
    def result_path(self) -> Path:
        """The path of `result.json`."""
        return self.path / RESULT_FILE

    @property
    def report_path(self) -> Path:
        """The path of `report.html`."""
        return self.path / REPORT_FILE

    def write_result(self, result: RunResult | FleetLoad) -> Path:
        """Write `result` to `result_path` and return that path. An earlier result is replaced.

        Raises OSError if the file cannot be written.
        """
        return write_document(self.result_path, result)


def read_result(folder: Path | str) -> RunResult:
    """Return the result in a run folder, or in its result.json. A run of `meltcore bench` is a ScoredRun.

    Raises ConfigError as `read_document` does.
    """
    return read_document(folder, RunResult, ScoredRun, name=RESULT_FILE)
