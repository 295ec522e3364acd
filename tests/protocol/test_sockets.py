"""Socket folders: one per live process, and stale ones of killed processes removed."""

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
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.protocol.sockets import SocketFolder

_HOLD = """
import sys
from meltcore.protocol.sockets import SocketFolder
folder = SocketFolder(sys.argv[1])
(folder.path / "a.sock").touch()
print(folder.path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(temporary_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """TMPDIR of this process too."""
    monkeypatch.setattr(tempfile, "tempdir", str(temporary_folder))
    return temporary_folder


@contextmanager
def holder(kind: str = "server") -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A live process that holds a socket folder, and that folder."""
    command = [sys.executable, "-c", _HOLD, kind]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())
    finally:
        process.kill()
        process.communicate(timeout=WAIT_S)


def test_next_start_removes_folders_of_killed_processes_only() -> None:
    with holder() as (_, living), holder() as (killed, left), holder("group") as (other, other_kind):
        for process in (killed, other):
            process.kill()
            process.wait(WAIT_S)
        assert left.exists()
        new = SocketFolder("server")
        assert not left.exists()
        assert (living / "a.sock").exists()
        assert other_kind.exists()
        new.remove()
        assert not new.path.exists()
        assert (living / "a.sock").exists()


def test_foreign_files_and_older_folders_stay(temporary: Path) -> None:
    (temporary / "meltcore-abcdefgh").mkdir()  # a name of earlier versions, without a lock
    (temporary / "kept").mkdir()
    (temporary / "meltcore-server-link").symlink_to(temporary / "kept")
    (temporary / "meltcore-server-file").touch()
    expected = set(temporary.iterdir())
    SocketFolder("server").remove()
    assert set(temporary.iterdir()) == expected


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_folder_of_another_user_stays(temporary: Path) -> None:
    theirs = temporary / "meltcore-server-theirs"
    theirs.mkdir()
    os.chown(theirs, 12_345, -1)
    SocketFolder("server").remove()
    assert theirs.exists()


@pytest.mark.parametrize("moment", ["not opened yet", "not locked yet"])
def test_folder_removed_before_it_is_locked_is_created_again(moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that starts at the same time may remove it as stale."""
    made: list[str] = []
    make, lock = tempfile.mkdtemp, fcntl.flock
    removed: Callable[[], None] = lambda: Path(made[0]).rmdir()  # noqa: E731

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


def test_folder_locked_by_another_process_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
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


# threat: who reaches a server: its admin socket and its engines' sockets lie in a folder of the server's user alone
def test_no_other_user_enters_the_folder_of_sockets() -> None:
    earlier = os.umask(0)
    try:
        folder = SocketFolder("server")
    finally:
        os.umask(earlier)
    status = folder.path.stat()
    assert (status.st_uid, status.st_mode & 0o777) == (os.geteuid(), 0o700)
    folder.remove()


@pytest.mark.parametrize(
    ("kind", "longest"), [("server", "99999/from-engine-999.sock"), ("group", "rank-7.sock")], ids=["server", "group"]
)
def test_folder_name_too_long_for_sockets_is_refused(
    kind: Literal["server", "group"], longest: str, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 107 - len(f"{temporary}//meltcore-{kind}-12345678/{longest}")
    for size in (most, most + 1):
        deep = temporary / ("x" * size)
        deep.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(deep))
        if size > most:
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
