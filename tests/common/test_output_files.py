"""Output files and folders appear whole, and of two writers without --overwrite only one succeeds."""

from __future__ import annotations

import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.files import atomic_output, check_disk_space, write_atomic


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


@pytest.mark.parametrize(("num_bytes", "size"), [(2000, "1.95 KiB"), (3 * 2**19, "1.50 MiB"), (5 * 2**29, "2.50 GiB")])
def test_full_disk_is_named_with_sizes_in_a_fitting_unit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_bytes: int, size: str
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1024})())
    with pytest.raises(ConfigError, match=rf"out takes {size}; the disk of .* has 1 KiB free"):
        check_disk_space(tmp_path / "out", num_bytes)


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Lets no file grow beyond `num_bytes`: a write fails as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("old", ["file", "nothing"])
def test_link_stays_and_its_target_is_written(tmp_path: Path, old: str) -> None:
    target, link = tmp_path / "there" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(Path("there") / "target")
    if old == "file":
        target.write_bytes(b"old")
    write_atomic(link, b"new")
    assert link.is_symlink()
    assert not target.is_symlink()
    assert target.read_bytes() == b"new"
    with atomic_output(link, overwrite=True) as temporary_path:
        temporary_path.write_bytes(b"newer")
    assert link.is_symlink()
    assert target.read_bytes() == b"newer"
    assert sorted(tmp_path.rglob("*")) == [link, target.parent, target]


def test_folder_behind_a_link_is_replaced(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    put(target, "old", folder=True)
    link.symlink_to(target)
    with atomic_output(link, overwrite=True) as temporary_path:
        put(temporary_path, "new", folder=True)
    assert link.is_symlink()
    assert content_of(target) == "new"
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_existing_file_keeps_its_mode_and_a_new_one_obeys_the_umask(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(b"")
    old.chmod(0o640)
    previous = os.umask(0o027)
    try:
        write_atomic(new, b"x")
        old.chmod(0o664)
        write_atomic(old, b"x")
    finally:
        os.umask(previous)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640
    assert stat.S_IMODE(old.stat().st_mode) == 0o664


def test_device_and_pipe_are_written_directly(tmp_path: Path) -> None:
    null, pipe = tmp_path / "null", tmp_path / "pipe"
    null.symlink_to(os.devnull)
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_atomic(null, b"x")
        write_atomic(pipe, b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert null.is_symlink()
    assert stat.S_ISCHR(null.stat().st_mode)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    with pytest.raises(ConfigError, match="cannot write /dev/full: No space left on device"):
        write_atomic(Path("/dev/full"), b"x")
    with pytest.raises(ConfigError, match="pipe is a device or pipe; name a file"), atomic_output(pipe, overwrite=True):
        pytest.fail("a pipe has no temporary name")
    assert sorted(tmp_path.iterdir()) == [null, pipe]


def test_standard_output_gets_the_file_among_what_is_printed(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from meltcore.common.files import write_atomic; print('before'); "
        "write_atomic(Path('/proc/self/fd/1'), b'file\\n'); print('after')"
    )
    out = tmp_path / "out"
    with out.open("wb") as output:
        subprocess.run([sys.executable, "-c", program], stdout=output, check=True, timeout=WAIT_S)
    assert out.read_text() == "before\nfile\nafter\n"
    assert list(tmp_path.iterdir()) == [out]


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(b"old")
    with largest_file(1000), pytest.raises(ConfigError, match=r"cannot write .*old: File too large"):
        write_atomic(path, bytes(2000))
    assert path.read_bytes() == b"old"
    with pytest.raises(ConfigError, match=r"cannot write .*old/new: Not a directory"):
        write_atomic(path / "new", b"x")
    with pytest.raises(ConfigError, match=r"cannot write .*missing/new: No such file or directory"):
        write_atomic(tmp_path / "missing" / "new", b"x")
    with pytest.raises(ConfigError, match="cannot write "):
        write_atomic(tmp_path, b"x")
    assert list(tmp_path.iterdir()) == [path]
