"""Makes a temporary folder for the Unix sockets between the processes of a server, and the addresses of the sockets.

A killed process leaves its folder behind. The folder's lock tells whether the process still lives: the kernel releases
the lock when the process ends, for any reason. A process id would not tell this, because ids are reused, and containers
that share a temporary folder have separate ids.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from meltcore.common.errors import ConfigError

# The longest name of a socket in a folder of each kind. An address has at most 107 bytes and a terminator (unix(7)).
ADMIN_SOCKET = "admin.sock"  # of a fleet, in the folder of its server
_LONGEST_SOCKET_NAME = {"server": "/99999/from-engine-999.sock", "group": "/rank-7.sock"}
_MAX_ADDRESS_BYTES = 107
_OPEN_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def socket_address(directory: Path, direction: Literal["to-engine", "from-engine"], client_index: int) -> str:
    """Return the ZeroMQ address that a client binds and its engine connects to. Client 0 is the supervisor.

    The socket is a PUSH socket for the direction "to-engine" and a PULL socket for "from-engine".
    """
    return f"ipc://{directory}/{direction}-{client_index}.sock"


class SocketFolder:
    """Creates a folder, `path`, that only this user may enter, and removes the folders of killed processes.

    Raises ConfigError when the temporary folder (TMPDIR) cannot be written to, or its name is too long for sockets.
    """

    def __init__(self, purpose: Literal["server", "group"]) -> None:
        # Folders of earlier versions have other names and no lock, so they are left alone.
        prefix = f"meltcore-{purpose}-"
        _remove_stale_folders(prefix)
        try:
            self.path, self._lock_fd = _create_locked_folder(prefix)
        except OSError as error:
            raise ConfigError(f"no folder for sockets can be made: {error.strerror} (TMPDIR says where)") from error
        max_path_bytes = _MAX_ADDRESS_BYTES - len(_LONGEST_SOCKET_NAME[purpose])
        if (num_path_bytes := len(os.fsencode(self.path))) > max_path_bytes:
            self.remove()
            raise ConfigError(
                f"the folder for sockets, {self.path}, would have {num_path_bytes} bytes; "
                f"the limit is {max_path_bytes}: set TMPDIR to a shorter one"
            )

    def remove(self) -> None:
        """Remove the folder and release its lock. A second call does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _create_locked_folder(prefix: str) -> tuple[Path, int]:
    """Create a folder. Return its path, and the file descriptor that holds its lock."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix))
        try:
            folder_fd = os.open(path, _OPEN_FOLDER_FLAGS)
        except FileNotFoundError:
            continue  # removed as stale by a process that started at the same time
        try:
            is_locked = _lock_folder(folder_fd, path)
        except OSError:  # a file system without locks, where no process removes stale folders
            is_locked = True
        if is_locked:
            return path, folder_fd
        os.close(folder_fd)


def _remove_stale_folders(prefix: str) -> None:
    """Remove the folders of processes that have ended. A folder that cannot be removed is kept, and delays no start."""
    with suppress(OSError):
        for path in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError):
                folder_fd = os.open(path, _OPEN_FOLDER_FLAGS)
                try:
                    if os.fstat(folder_fd).st_uid == os.geteuid() and _lock_folder(folder_fd, path):
                        shutil.rmtree(path, ignore_errors=True)
                finally:
                    os.close(folder_fd)


def _lock_folder(folder_fd: int, path: Path) -> bool:
    """Lock an open folder until its file descriptor is closed. Return whether the folder is locked now.

    This fails if another process has the lock, or if `path` no longer leads to this folder. Raises OSError on a file
    system without locks.
    """
    try:
        fcntl.flock(folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(folder_fd), os.lstat(path))
    except (BlockingIOError, FileNotFoundError):
        return False
