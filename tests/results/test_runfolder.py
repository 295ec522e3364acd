import json
from pathlib import Path

import msgspec
import pytest

from meltcore.errors import ConfigError
from meltcore.results.runfolder import RunFolder, read_result, write_whole
from meltcore.results.schema import SCHEMA_VERSION, Fingerprint, RunResult


def a_result() -> RunResult:
    fingerprint = Fingerprint(cpu="c", cores=1, memory_bytes=1, kernel="k", python="3", taken="now")
    return RunResult(command="load", status="complete", started="now", duration_s=1.0, fingerprint=fingerprint)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "load")
    folder.write_result(a_result())
    assert read_result(folder.path) == a_result()
    assert read_result(folder.result_path) == a_result()


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    paths = {RunFolder.create(tmp_path / "new", "demo").path for _ in range(5)}
    assert len(paths) == 5
    assert all("-demo" in path.name for path in paths)


def test_a_failed_write_leaves_the_old_file_and_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_whole(path, b"old")

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(ConfigError, match="No space left"):
        write_whole(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_another_schema_version_is_refused_by_number(tmp_path: Path) -> None:
    fields = json.loads(msgspec.json.encode(a_result())) | {"schema_version": SCHEMA_VERSION + 1}
    (tmp_path / "result.json").write_text(json.dumps(fields))
    with pytest.raises(
        ConfigError, match=f"version {SCHEMA_VERSION + 1}; this meltcore reads version {SCHEMA_VERSION}"
    ):
        read_result(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", '{"schema_version": "1"}'])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match="is no meltcore result"):
        read_result(tmp_path)


def test_a_result_with_a_wrong_field_is_refused_by_name(tmp_path: Path) -> None:
    fields = json.loads(msgspec.json.encode(a_result())) | {"status": "half"}
    (tmp_path / "result.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match="status"):
        read_result(tmp_path)


def test_a_run_that_never_finished_says_so(tmp_path: Path) -> None:
    (tmp_path / "requests.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="ended before it could write one"):
        read_result(tmp_path)


def test_a_root_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make the run folder"):
        RunFolder.create(tmp_path / "file", "load")


def test_an_error_leaves_no_empty_folder_and_none_that_holds_something_is_taken_away(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    with pytest.raises(ConfigError), RunFolder.kept_if_used(root, "eval"):
        raise ConfigError("nothing could be done")
    assert not root.exists()
    used: list[Path] = []

    def end_half_way() -> None:
        with RunFolder.kept_if_used(root, "eval") as folder:
            folder.requests_path.write_text("{}")
            used.append(folder.path)
            raise ConfigError("half way")

    with pytest.raises(ConfigError):
        end_half_way()
    with pytest.raises(ConfigError), RunFolder.kept_if_used(root, "eval"):
        raise ConfigError("nothing could be done")
    assert list(root.iterdir()) == used
