"""Folders of sockets: one for each process that lives, and none left for long of those that were killed."""

import fcntl
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pytest

from meltcore.engine.socket_folder import SocketFolder
from meltcore.errors import ConfigError

_HOLD = """
import sys
from meltcore.engine.socket_folder import SocketFolder
folder = SocketFolder(sys.argv[1])
(folder.path / "a.sock").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""
WAIT_S = 60


@pytest.fixture(autouse=True)
def temporary(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That of this process, too."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_folder))
    return temporary_folder


@contextmanager
def holder(kind: str = "server") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that lives, and its folder."""
    command = [sys.executable, "-c", _HOLD, kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_what_a_killed_process_left_goes_with_the_next_start_and_what_lives_stays() -> None:
    with holder() as (_, living), holder() as (killed, left), holder("group") as (other, of_another_kind):
        for process in (killed, other):
            process.kill()
            process.wait(WAIT_S)
        assert left.exists()
        new = SocketFolder("server")
        assert not left.exists()
        assert (living / "a.sock").exists()
        assert of_another_kind.exists()
        new.remove()
        assert not new.path.exists()
        assert (living / "a.sock").exists()


def test_what_is_not_ours_stays(temporary: Path) -> None:
    (temporary / "meltcore-abcdefgh").mkdir()  # as earlier versions called theirs, without a lock
    (temporary / "kept").mkdir()
    (temporary / "meltcore-server-link").symlink_to(temporary / "kept")
    (temporary / "meltcore-server-file").touch()
    expected = set(temporary.iterdir())
    SocketFolder("server").remove()
    assert set(temporary.iterdir()) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_stays(temporary: Path) -> None:
    theirs = temporary / "meltcore-server-theirs"
    theirs.mkdir()
    os.chown(theirs, 12_345, -1)
    SocketFolder("server").remove()
    assert theirs.exists()


@pytest.mark.parametrize("moment", ["not opened yet", "not locked yet"])
def test_one_taken_for_left_before_it_is_locked_is_made_anew(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process that starts at the same time."""
    made: list[str] = []
    make, lock = tempfile.mkdtemp, fcntl.flock
    removed: Callable[[], None] = lambda: os.rmdir(made[0])  # noqa: E731

    def mkdtemp(**settings: str) -> str:
        made.append(make(**settings))
        if len(made) == 1 and moment == "not opened yet":
            removed()
        return made[-1]

    def flock(folder: int, how: int) -> None:
        if len(made) == 1 and moment == "not locked yet":
            removed()
        lock(folder, how)

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    monkeypatch.setattr(fcntl, "flock", flock)
    folder = SocketFolder("server")
    assert str(folder.path) == made[1]
    assert folder.path.exists()
    folder.remove()


def test_one_that_another_process_is_about_to_remove_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    make = tempfile.mkdtemp

    def mkdtemp(**settings: str) -> str:
        made.append(make(**settings))
        if len(made) == 1:
            fcntl.flock(os.open(made[0], os.O_RDONLY), fcntl.LOCK_EX)
        return made[-1]

    monkeypatch.setattr(tempfile, "mkdtemp", mkdtemp)
    folder = SocketFolder("server")
    assert str(folder.path) == made[1]
    folder.remove()


@pytest.mark.parametrize(
    ("kind", "longest"), [("server", "99/from-engine-999.sock"), ("group", "rank-7.sock")], ids=["server", "group"]
)
def test_a_folder_too_long_for_sockets_is_refused_and_the_longest_other_is_not(
    kind: Literal["server", "group"], longest: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = 107 - len(f"{temporary}//meltcore-{kind}-12345678/{longest}")
    for size in (room, room + 1):
        deep = temporary / ("x" * size)
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        if size > room:
            with pytest.raises(ConfigError, match=r"would have \d+ bytes; the limit is \d+: set TMPDIR"):
                SocketFolder(kind)
            assert not list(deep.iterdir())
            continue
        folder = SocketFolder(kind)
        place = folder.path / longest
        place.parent.mkdir(exist_ok=True)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(place))
        folder.remove()
