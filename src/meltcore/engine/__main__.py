"""Runs an engine in a separate process: `python -m meltcore.engine SOCKET_DIR [CLIENT_COUNT]`.

Clients are the supervisor, of index 0, and the API servers. Each client binds two sockets in that folder
(`protocol/sockets.py`). The server writes the EngineConfig as one JSON line to the standard input and keeps the input
open. The end of the standard input ends this process in any state. Clients on another machine connect over TCP
(`protocol/tcp.py`); in that case the process ends when all connections have ended.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.process import loading_modules
from meltcore.common.tasks import DEFAULT, load
from meltcore.engine.distributed.rank_start import StartedRanks
from meltcore.models.checkpoints.checkpoint import find_task
from meltcore.protocol.tcp import is_remote
from meltcore.settings.config import EngineConfig


def main() -> int:
    """Run an engine process, which serves clients through its socket folder. Return the exit status."""
    # The server decides when this process ends. It may have requests to drain when systemd, or the end of a job, sends
    # SIGTERM to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    Path("/proc/self/comm").write_text(Path(config.model).name)  # so that ps and top tell the engines of a fleet apart
    if not is_remote(Path(sys.argv[1])):  # else the end of all connections to the server ends this process
        threading.Thread(target=_exit_at_end_of_stdin, daemon=True).start()
    if config.memory_bytes is not None and not config.enable_sleep_mode:  # its memory pools cannot have such segments
        # Otherwise torch rounds each large tensor up to 2 MiB, and a budget in bytes loses a piece with every weight:
        # 477 MiB of Gemma-3-27B in Q4_0 (H200, 2026-11-24). Torch reads it when it is imported.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    task, load_error = DEFAULT, None
    try:
        task = find_task(config.model, dummy=config.load_format == "dummy")
    except ConfigError as error:
        load_error = error  # which its start reports
    has_ranks = config.tensor_parallel_size > 1 and "tensor_parallel_size" in task.settings
    ranks = {"ranks": StartedRanks(config.tensor_parallel_size)} if has_ranks else {}
    with loading_modules():  # these import torch, which takes seconds, while the other ranks do the same
        from meltcore.engine.host.budget import build_within_budget
        from meltcore.engine.host.shell import Engine, serve

        make = load(task.engine)

    def build(progress: Callable[[str, float], None]) -> Engine:
        if load_error is not None:
            raise load_error
        engine: Engine = make(config, progress=progress, **ranks)
        return engine

    to_engine, clients = load(task.messages).ToEngine, int(sys.argv[2]) if len(sys.argv) > 2 else 1
    return serve(build_within_budget(config, build), to_engine, Path(sys.argv[1]), clients, config.sharing)


def _exit_at_end_of_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    exit_status = main()
    from meltcore.engine.host.device import exit_process  # now that torch is imported

    exit_process(exit_status)
