"""The engine as a process of its own: `python -m meltcore.engine SOCKET_DIR [FRONTS]`.

Each front binds two sockets in that folder (`messages.socket_address`). The first one writes the EngineConfig as one
JSON line to our standard input and keeps it open. Its end means the server is gone, however it went, and so do we go.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import msgspec

from meltcore.config import EngineConfig
from meltcore.engine.rank_start import StartedRanks


def main() -> int:
    # The front decides when we leave: it may have answers to drain when systemd, or the end of a job, sends SIGTERM to
    # all processes of a service at once.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    threading.Thread(target=_leave_with_front, daemon=True).start()
    ranks = StartedRanks(config.tp) if config.tp > 1 else None
    from meltcore.engine.process import serve  # torch comes with it, here while it comes to the other ranks

    return serve(config, ranks, Path(sys.argv[1]), *map(int, sys.argv[2:]))


def _leave_with_front() -> None:
    """Wait for the end of standard input, then exit at once, whatever the main thread is doing."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
