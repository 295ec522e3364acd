"""Runs a command that must not outlive its parent: `python -m meltcore.common.die_with_parent COMMAND ...`.

Standard input is a pipe whose write end the parent holds. Its first line is the command's environment as JSON.
Meltcore's own engine ends when its input ends. An upstream server or an MPS daemon would continue, and keep memory of
its GPU. So this guard process leads the process group of the command, and ends the whole group, itself included.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from meltcore.common.process import LoggedProcess, ProcessError, signal_group, start

TERMINATE_LIMIT_S = 10.0


class GuardedProcess(LoggedProcess):
    """Runs a command in a guard process, which ends the command even if this process is killed."""

    def __init__(
        self, command: Sequence[str], log_path: Path, *, environment: Mapping[str, str], **options: Any
    ) -> None:
        """Store the command and its whole environment. LoggedProcess describes `options`."""
        super().__init__([sys.executable, "-m", __name__, *command], log_path, stdin=subprocess.PIPE, **options)
        self._command_environment = dict(environment)  # the guard has ours, which may be for another Python

    def start(self) -> Self:
        """Start the guard and the command. Raises the errors of LoggedProcess."""
        super().start()
        with suppress(BrokenPipeError):  # the guard has ended, as the caller will see
            self.send(json.dumps(self._command_environment).encode() + b"\n")
        return self


def _end_with_parent() -> None:
    """Wait for the end of standard input, then end the process group."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    signal_group(os.getpgrp(), signal.SIGTERM)
    time.sleep(TERMINATE_LIMIT_S)
    signal_group(os.getpgrp(), signal.SIGKILL)


def main() -> int:
    """Run the command and return its exit status. If a signal killed it, return 128 plus the signal's number."""
    try:
        process = start(sys.argv[1:], new_session=False, environment=json.loads(sys.stdin.buffer.readline()))
    except ProcessError as error:
        print(error, file=sys.stderr)
        return 127
    # The owner signals the group: the command decides what to do, and this process ends with it.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    returncode = process.wait()
    return returncode if returncode >= 0 else 128 - returncode


if __name__ == "__main__":
    sys.exit(main())
