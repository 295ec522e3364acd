"""Runs a command that must not outlive its parent: `python -m meltcore.common.die_with_parent COMMAND ...`.

Standard input is a pipe whose write end the parent holds. Its first line is the command's environment as JSON.
Meltcore's own engine ends when its input ends. An upstream server would continue, and keep its GPU's memory. So this
guard process leads the process group of the server, and ends the whole group, itself included.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time

from meltcore.common.process import ProcessError, signal_group, start

TERMINATE_LIMIT_S = 10.0


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
