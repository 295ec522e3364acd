import json
from pathlib import Path

import msgspec
import pytest

from meltcore.common.errors import ConfigError
from meltcore.common.files import SCHEMA_VERSION, write_atomic
from meltcore.measure.documents.runfolder import RunFolder, read_result
from meltcore.measure.documents.schema import Fingerprint, RunResult


def a_result() -> RunResult:
    fingerprint = Fingerprint(cpu="c", cores=1, memory_bytes=1, kernel="k", python="3", taken="now")
    return RunResult(command="load", status="complete", started="now", duration_s=1.0, fingerprint=fingerprint)


def test_written_result_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "load")
    folder.write_result(a_result())
    assert read_result(folder.path) == a_result()
    assert read_result(folder.result_path) == a_result()


def test_runs_within_one_second_get_separate_folders(tmp_path: Path) -> None:
    paths = {RunFolder.create(tmp_path / "new", "demo").path for _ in range(5)}
    assert len(paths) == 5
    assert all("-demo" in path.name for path in paths)


def test_failed_write_keeps_old_file_and_leaves_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_unknown_schema_version_is_rejected_with_its_number(tmp_path: Path) -> None:
    fields = json.loads(msgspec.json.encode(a_result())) | {"schema_version": SCHEMA_VERSION + 1}
    (tmp_path / "result.json").write_text(json.dumps(fields))
    with pytest.raises(
        ConfigError, match=f"version {SCHEMA_VERSION + 1}; this meltcore reads version {SCHEMA_VERSION}"
    ):
        read_result(tmp_path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[" * 3000, "is not valid JSON"),
        ("[]", "is not a meltcore document"),
        ("{}", "is not a meltcore document"),
        ('{"schema_version": "1"}', "is not a meltcore document"),
        ('{"schema_version": 1, "command": "load"}', "is not a meltcore document"),
        ('{"document": "run", "command": "load"}', "has schema version None; this meltcore reads version 2"),
        ('{"document": "baseline", "schema_version": 2}', "holds a baseline, not a run or a score"),
    ],
)
def test_file_that_is_not_a_result_is_rejected(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_result(tmp_path)


def test_result_with_invalid_field_is_rejected_with_its_name(tmp_path: Path) -> None:
    fields = json.loads(msgspec.json.encode(a_result())) | {"status": "half"}
    (tmp_path / "result.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="status"):
        read_result(tmp_path)


def test_missing_result_of_unfinished_run_is_explained(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="ended before it could write one"):
        read_result(tmp_path)


def test_root_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot create the run folder"):
        RunFolder.create(tmp_path / "file", "load")


def test_error_removes_empty_folder_and_keeps_used_one(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with pytest.raises(ConfigError), RunFolder.create_or_remove(root, "eval"):
        raise ConfigError("the run failed")
    assert not root.exists()
    used: list[Path] = []

    def fail_after_writing() -> None:
        with RunFolder.create_or_remove(root, "eval") as folder:
            folder.requests_path.write_text("{}")
            used.append(folder.path)
            raise ConfigError("the run failed")

    with pytest.raises(ConfigError):
        fail_after_writing()
    with pytest.raises(ConfigError), RunFolder.create_or_remove(root, "eval"):
        raise ConfigError("the run failed")
    assert list(root.iterdir()) == used
