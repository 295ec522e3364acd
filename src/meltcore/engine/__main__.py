"""The engine as a process of its own: `python -m meltcore.engine SOCKET_DIR [CLIENT_COUNT]`.

Clients are the supervisor, of index 0, and the API servers. Each binds two sockets in that folder
(`protocol/sockets.py`). The server writes the EngineConfig as one JSON line to the standard input and keeps it open;
the end of the standard input ends this process, whatever it is doing. Clients on another machine connect over TCP
(`protocol/tcp.py`); then the end of all connections ends it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from meltcore.common.errors import ConfigError
from meltcore.common.process import loading_modules
from meltcore.engine.distributed.rank_start import StartedRanks
from meltcore.models.checkpoints.checkpoint import is_synthesis_model, is_transcription_model, is_translation_model
from meltcore.protocol.tcp import is_remote
from meltcore.settings.config import EngineConfig


def main() -> int:
    """Run an engine process, which serves clients through its socket folder. Returns the exit status."""
    # The server decides when this process ends. It may have requests to drain when systemd, or the end of a job, sends
    # SIGTERM to all processes of a service.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    if not is_remote(Path(sys.argv[1])):  # else the end of all connections to the server ends this process
        threading.Thread(target=_exit_at_end_of_stdin, daemon=True).start()
    if config.memory_bytes is not None and not config.enable_sleep_mode:  # its memory pools cannot have such segments
        # Otherwise torch rounds each large tensor up to 2 MiB, and a budget in bytes loses a piece with every weight:
        # 477 MiB of Gemma-3-27B in Q4_0 (H200, 2026-11-24). Torch reads it when it is imported.
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
    if (batch_task := _batch_task(config)) is not None:
        return _serve_task(config, batch_task)
    ranks = StartedRanks(config.tensor_parallel_size) if config.tensor_parallel_size > 1 else None
    with loading_modules():  # these import torch, which takes seconds, while the other ranks do the same
        from meltcore.engine.generation.engine import GenerationEngine
        from meltcore.engine.host.budget import build_within_budget
        from meltcore.engine.host.shell import serve
        from meltcore.protocol.generation import ToEngine

    def build(progress: Callable[[str, float], None]) -> GenerationEngine:
        return GenerationEngine(config, progress=progress, ranks=ranks)

    return serve(build_within_budget(config, build), ToEngine, Path(sys.argv[1]), _client_count(), config.sharing)


def _client_count() -> int:
    return int(sys.argv[2]) if len(sys.argv) > 2 else 1


_Task = Literal["transcription", "synthesis", "translation"]


def _batch_task(config: EngineConfig) -> _Task | None:
    """Return the task of a model that is served by the batch engine; None for text generation."""
    is_dummy = config.load_format == "dummy"
    try:
        if is_transcription_model(config.model, dummy=is_dummy):
            return "transcription"
    except ConfigError:
        return "transcription"  # and its start reports the error
    if is_synthesis_model(config.model, dummy=is_dummy):
        return "synthesis"
    return "translation" if is_translation_model(config.model, dummy=is_dummy) else None


def _serve_task(config: EngineConfig, task: _Task) -> int:
    build: BuildEngine
    to_engine: object
    with loading_modules():
        from meltcore.engine.host.budget import build_within_budget
        from meltcore.engine.host.shell import BuildEngine, serve

        if task == "transcription":
            from meltcore.engine.transcription.engine import transcription_engine
            from meltcore.protocol.transcription import ToEngine as ToTranscription

            build = build_within_budget(config, partial(transcription_engine, config))
            to_engine = ToTranscription
        elif task == "synthesis":
            from meltcore.engine.synthesis.engine import synthesis_engine
            from meltcore.protocol.synthesis import ToEngine as ToSynthesis

            build = build_within_budget(config, partial(synthesis_engine, config))
            to_engine = ToSynthesis
        else:
            from meltcore.engine.translation.engine import translation_engine
            from meltcore.protocol.translation import ToEngine as ToTranslation

            build = build_within_budget(config, partial(translation_engine, config))
            to_engine = ToTranslation
    return serve(build, to_engine, Path(sys.argv[1]), _client_count(), config.sharing)


def _exit_at_end_of_stdin() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    exit_status = main()
    from meltcore.engine.host.device import exit_process  # now that torch is imported

    exit_process(exit_status)
