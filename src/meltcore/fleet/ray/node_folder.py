"""Folders in a node's temporary directory: locks tell whose owners have all died, and those are removed."""

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
    """A folder that its processes share. The process that leaves it last removes it.

    The next folder that is made here removes folders of dead owners. Each owner holds a shared lock on `descriptor`.
    SIGKILL drops it, once no process that has inherited it lives: such a process keeps the folder from others, but not
    from `close` of the owner whose lock it shares.
    """

    def __init__(self, name: str) -> None:
        """Make the folder `meltcore-NAME`, or join the processes that have it. Only this user may enter.

        The name begins with "engine-", "node-", "marks-" or "ray-". Raises OSError where another user has it.
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
        """Leave the folder, and remove it unless another owner has it."""
        _remove_unlocked(self.path, self.descriptor)
        os.close(self.descriptor)


def remove_abandoned() -> None:
    """Remove the folders of this user whose owners have all died without leaving them."""
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
    """Return whether an open folder has this path, which may have been removed and made again since."""
    with suppress(FileNotFoundError):
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    return False


def _remove_unlocked(path: Path, descriptor: int) -> None:
    """Remove a folder unless another process has it."""
    with suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_open(path, descriptor):
            shutil.rmtree(path, ignore_errors=True)
