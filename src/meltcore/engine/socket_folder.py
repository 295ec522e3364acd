"""A folder of sockets in the temporary folder, for as long as its process lives, and the removal of those left behind.

A process that is killed removes nothing. Its folder is known to be left by a lock that the kernel takes back with the
process, however that ended; ids of processes are used again, and mean nothing across containers that share a folder.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from meltcore.errors import ConfigError

# The longest name of a socket in a folder of each kind. An address has 107 bytes and an end (unix(7)).
_LONGEST_NAME = {"server": "/99/from-engine-999.sock", "group": "/rank-7.sock"}
_ADDRESS_BYTES = 107
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class SocketFolder:
    """A new folder, `path`, which only this user may enter. Those of its kind that killed processes left are removed.

    Raises ConfigError where the temporary folder (TMPDIR) cannot be written to, or its name is too long for sockets.
    """

    def __init__(self, kind: Literal["server", "group"]) -> None:
        # Folders of earlier versions have other names and no lock: nobody could tell whether they are in use.
        prefix = f"meltcore-{kind}-"
        _remove_left(prefix)
        try:
            self.path, self._lock = _make(prefix)
        except OSError as error:
            raise ConfigError(f"no folder for sockets can be made: {error.strerror} (TMPDIR says where)") from error
        limit = _ADDRESS_BYTES - len(_LONGEST_NAME[kind])
        if (size := len(os.fsencode(self.path))) > limit:
            self.remove()
            raise ConfigError(
                f"the folder for sockets, {self.path}, would have {size} bytes; the limit is {limit}: "
                "set TMPDIR to a shorter one"
            )

    def remove(self) -> None:
        """Can be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _make(prefix: str) -> tuple[Path, int]:
    """A new folder, and the descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            folder = os.open(path, _FOLDER)
        except FileNotFoundError:
            continue  # taken for one left behind, by a process that started at the same time
        try:
            locked = _lock(folder, path)
        except OSError:  # a file system without locks, where nobody else can take it for one left behind
            locked = True
        if locked:
            return path, folder
        os.close(folder)


def _remove_left(prefix: str) -> None:
    """What cannot be removed stays: it is no fault of the process that starts."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):
                folder = os.open(path, _FOLDER)
                try:
                    if os.fstat(folder).st_uid == os.geteuid() and _lock(folder, path):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(folder)


def _lock(folder: int, path: Path) -> bool:
    """Take the lock of an open folder, until it is closed. False where another process has it, or `path` is no longer
    that folder. Raises OSError where the file system has no locks."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(folder), os.lstat(path))
    except (BlockingIOError, FileNotFoundError):
        return False
