"""Makes folders in a node's temporary directory.

Locks show whether a folder has a living owner. Folders without one are removed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "meltcore-"
_KINDS = ("engine-", "node-", "marks-", "ray-")  # what names begin with


class NodeFolder:
    """A folder that several processes share. The process that leaves the folder last removes it.

    Each owner holds a shared lock on `descriptor`. When the next folder is created here, folders without a living owner
    are removed. If an owner is killed, its lock is dropped when no process that has inherited the lock lives any more.
    Such a process protects the folder from other processes, but not from `close` of the owner.
    """

    def __init__(self, name: str) -> None:
        """Create the folder `meltcore-NAME`, or join the processes that have created it. Only this user may enter.

        The name begins with "engine-", "node-", "marks-" or "ray-". Raises OSError if the folder belongs to another
        user.
        """
        remove_abandoned()
        self.path = Path(tempfile.gettempdir()) / f"{_PREFIX}{name}"
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            with suppress(FileNotFoundError):  # removed meanwhile
                self.descriptor = _open(self.path)
                fcntl.flock(self.descriptor, fcntl.LOCK_SH)
                if _is_open(self.path, self.descriptor):
                    return
                os.close(self.descriptor)

    def close(self) -> None:
        """Leave the folder, and remove it if no other process owns it."""
        _remove_unlocked(self.path, self.descriptor)
        os.close(self.descriptor)


def remove_abandoned() -> None:
    """Remove this user's folders whose owners have all died without leaving them."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*-*"):
        if not path.name.removeprefix(_PREFIX).startswith(_KINDS):
            continue
        with suppress(OSError):  # removed meanwhile, or another user's
            descriptor = _open(path)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    _remove_unlocked(path, descriptor)
            finally:
                os.close(descriptor)


def _open(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _is_open(path: Path, descriptor: int) -> bool:
    """Return whether this path still leads to an open folder. The folder may have been removed and created again."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def _remove_unlocked(path: Path, descriptor: int) -> None:
    """Remove a folder if no other process holds its lock."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_open(path, descriptor):
            shutil.rmtree(path, ignore_errors=True)
