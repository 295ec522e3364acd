"""A rank other than 0, as a process of its own: `python -m meltcore.engine.rank_process FOLDER RANK`.

Rank 0's process starts it, writes the EngineConfig as one JSON line to its standard input and keeps that open: its end
means that rank 0 is gone, and so this process goes, whatever it is doing.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
from pathlib import Path

import msgspec
import torch
import zmq

from meltcore.config import EngineConfig
from meltcore.engine.compile_ahead import Turn
from meltcore.engine.group_runner import GroupRunner
from meltcore.engine.loading import choose_device, load
from meltcore.engine.rank_messages import (
    CaptureGraphs,
    CompileKernels,
    FromRank,
    Leave,
    RankFailed,
    RankLoaded,
    RankStage,
    RunStep,
    Settle,
    ToRank,
    encoder,
    rank_address,
    to_rank_decoder,
)
from meltcore.engine.ranks import join_group, limit_waits, step_board
from meltcore.engine.sampler import Sampler
from meltcore.engine.warm_up import compile_kernels
from meltcore.errors import MeltcoreError
from meltcore.kernels.dispatch import force_reference
from meltcore.layers.group import Group
from meltcore.layers.uniform_routing import route_at_random
from meltcore.models.checkpoint import open_checkpoint


class RankProcess:
    """Does what rank 0 says, step by step."""

    def __init__(self, folder: Path, rank: int, config: EngineConfig) -> None:
        self._folder, self._rank, self._config = folder, rank, config
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.set_hwm(0)
        self._inbox.connect(rank_address(folder, rank))
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.connect(rank_address(folder, 0))
        self._begun, self._signs = step_board(folder, config.tp)

    def serve(self) -> int:
        """Until rank 0 has us leave; returns the exit status."""
        try:
            group = Group(self._rank, self._config.tp)
            runner = self._build(group)
            while self._follow(runner):
                pass
            runner.forget_graphs()
            group.leave()
        except Exception as error:
            text = str(error) if isinstance(error, MeltcoreError) else f"{type(error).__name__}: {error}"
            self._send(RankFailed(self._rank, " ".join(text.split())))
            self._context.destroy(linger=1000)
            return 1
        return 0

    def _build(self, group: Group) -> GroupRunner:
        config = self._config
        device = choose_device(config.device, ranks=config.tp, rank=self._rank)
        force_reference("reference-kernels" in config.debug)
        route_at_random("uniform-routing" in config.debug, config.seed)
        self._send(RankStage(self._rank, "started"))
        join_group(group, self._folder, device, config)
        checkpoint = open_checkpoint(config.model, files="config" if config.load_format == "dummy" else "all")
        loaded = load(config, checkpoint, device, self._give_sign, group)
        self._send(RankLoaded(self._rank, loaded.plan))
        settled = self._receive()
        assert isinstance(settled, Settle)
        # Rank 0 alone chooses where there are penalties: no slots for them here.
        sampler = Sampler(loaded.model.config.vocab_size, device, config.seed)
        runner = GroupRunner(loaded.model, sampler, settled.layout, loaded.cache_dtype, group)
        limit_waits(group, config)
        gc.collect()
        gc.freeze()
        self._send(RankStage(self._rank, "settled"))
        return runner

    def _follow(self, runner: GroupRunner) -> bool:
        """Take one order. False: leave."""
        message = self._receive()
        if isinstance(message, RunStep):
            self._begun[self._rank] = message.number
            runner.follow(message.step, message.choices)
        elif isinstance(message, CompileKernels):
            compile_kernels(runner, message.limits, Turn(self._rank, self._config.tp))
        elif isinstance(message, CaptureGraphs):
            prompts = "no-prompt-graphs" not in self._config.debug
            runner.capture_graphs(lambda stage, fraction: None, prompts=prompts)
        return not isinstance(message, Leave)

    def _give_sign(self, stage: str, fraction: float) -> None:
        self._signs[self._rank] += 1

    def _receive(self) -> ToRank:
        """Wait for as long as rank 0 lives."""
        return to_rank_decoder.decode(self._inbox.recv())

    def _send(self, message: FromRank) -> None:
        self._outbox.send(encoder.encode(message))


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when we leave
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    line = sys.stdin.buffer.readline()
    if not line:  # rank 0 was gone before it had read its own settings
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    config = msgspec.json.decode(line, type=EngineConfig)
    torch.set_num_threads(max(1, (len(os.sched_getaffinity(0)) - 1) // config.tp))
    threading.Thread(target=_leave_with_rank_0, args=(folder,), daemon=True).start()
    return RankProcess(folder, rank, config).serve()


def _leave_with_rank_0(folder: Path) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # rank 0 does so itself, unless it was killed
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
