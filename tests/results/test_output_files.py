"""Output files and folders appear whole, and of two writers without --overwrite only one succeeds."""

from __future__ import annotations

from pathlib import Path

import pytest

from meltcore.errors import ConfigError
from meltcore.results.files import atomic_output, check_disk_space


def put(path: Path, content: str, *, folder: bool) -> None:
    if folder:
        path.mkdir()
    (path / "part" if folder else path).write_text(content)


def content_of(path: Path) -> str:
    return (path / "part" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("folder", [False, True])
def test_second_of_two_writers_is_refused(tmp_path: Path, folder: bool) -> None:
    out = tmp_path / "out"

    def write_second() -> None:
        with atomic_output(out) as temporary_path:
            put(temporary_path, "second", folder=folder)
            put(out, "first", folder=folder)  # by another process

    with pytest.raises(ConfigError, match="out exists already; --overwrite replaces it"):
        write_second()
    assert content_of(out) == "first"
    assert list(tmp_path.iterdir()) == [out]
    with atomic_output(out, overwrite=True) as temporary_path:
        put(temporary_path, "third", folder=folder)
    assert content_of(out) == "third"


@pytest.mark.parametrize("folder", [False, True])
def test_failed_rename_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: bool) -> None:
    def fail(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    def write() -> None:
        with atomic_output(tmp_path / "out") as path:
            put(path, "x", folder=folder)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            write()
    assert list(tmp_path.iterdir()) == []
    with atomic_output(tmp_path / "out") as path:
        put(path, "y", folder=folder)
    assert content_of(tmp_path / "out") == "y"


@pytest.mark.parametrize(("num_bytes", "size"), [(2000, "2.0 KiB"), (3 * 2**19, "1.5 MiB"), (5 * 2**29, "2.5 GiB")])
def test_full_disk_is_named_with_sizes_in_a_fitting_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, size: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1024})())
    with pytest.raises(ConfigError, match=rf"out takes {size}; the disk of .* has 1\.0 KiB free"):
        check_disk_space(tmp_path / "out", num_bytes)
