"""Runs a rank other than 0 in a process of its own: `python -m meltcore.engine.distributed FOLDER RANK`.

Rank 0's process starts it, writes the EngineConfig as one JSON line to its standard input and keeps that open. The end
of the standard input means that rank 0 has ended, and ends this process immediately.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import threading
import traceback
from pathlib import Path

import msgspec
import torch
import zmq

from meltcore.common.errors import MeltcoreError
from meltcore.engine.distributed.group_runner import GroupRunner
from meltcore.engine.distributed.rank_messages import (
    Allocate,
    CaptureGraphs,
    CompileKernels,
    FromRank,
    LeaveGroup,
    RankFailed,
    RankLoaded,
    RankStage,
    RunStep,
    ToRank,
    decoder_on_rank,
    encoder,
    rank_address,
)
from meltcore.engine.distributed.ranks import join_group, set_collective_timeout, step_counters
from meltcore.engine.host.budget import limit_memory
from meltcore.engine.host.device import choose_device, has_budget
from meltcore.engine.worker.loading import load
from meltcore.engine.worker.sampler import Sampler
from meltcore.engine.worker.warm_up import KernelCompiler, make_compiler
from meltcore.kernels.launch import force_implementation
from meltcore.layers.tensor_parallel import TensorParallelGroup
from meltcore.layers.uniform_routing import set_uniform_routing
from meltcore.models.checkpoints.checkpoint import CheckpointFiles, open_checkpoint
from meltcore.settings.config import EngineConfig


class RankProcess:
    """Executes the messages of rank 0."""

    def __init__(self, folder: Path, rank: int, config: EngineConfig) -> None:
        self._folder, self._rank, self._config = folder, rank, config
        self._context = zmq.Context()
        self._receiver = self._context.socket(zmq.PULL)
        self._receiver.set_hwm(0)
        self._receiver.connect(rank_address(folder, rank))
        self._sender = self._context.socket(zmq.PUSH)
        self._sender.connect(rank_address(folder, 0))
        self._compiler: KernelCompiler | None = None
        self._begun_steps, self._progress = step_counters(folder, config.tensor_parallel_size)

    def serve(self) -> int:
        """Load the model, then execute messages until LeaveGroup. Return the exit status."""
        try:
            group = TensorParallelGroup(self._rank, self._config.tensor_parallel_size)
            runner = self._build_runner(group)
            while self._handle_message(runner):
                pass
            runner.drop_graphs()
            group.destroy()
        except Exception as error:
            text = str(error)
            if not isinstance(error, MeltcoreError):
                traceback.print_exc()  # to the model's log: the message has one line of it
                text = f"{type(error).__name__}: {error}"
            self._send(RankFailed(self._rank, " ".join(text.split())))
            self._context.destroy(linger=1000)
            return 1
        return 0

    def _build_runner(self, group: TensorParallelGroup) -> GroupRunner:
        config = self._config
        device = choose_device(config.device, num_ranks=config.tensor_parallel_size, rank=self._rank)
        self._compiler = make_compiler(config, device, self._rank)
        limit_memory(config, device)
        force_implementation("reference" if "reference-kernels" in config.debug else None)
        set_uniform_routing("uniform-routing" in config.debug, config.seed)
        self._send(RankStage(self._rank, "started"))
        join_group(group, self._folder, device, config)
        files: CheckpointFiles = "config" if config.load_format == "dummy" else "all"
        checkpoint = open_checkpoint(config.model, files=files, tokenizer=config.tokenizer)
        loaded = load(config, checkpoint, device, self._count_progress, group)
        self._send(RankLoaded(self._rank, loaded.plan))
        message = self._receive()
        assert isinstance(message, Allocate)
        # Rank 0 alone samples sequences with penalties: no slots for them here.
        sampler = Sampler(loaded.model.config.vocab_size, device, config.seed)
        runner = GroupRunner(loaded.model, sampler, message.config, loaded.cache_dtype, group)
        if config.speculation is not None and config.has_mtp:  # rank 0 alone drafts by n-gram
            runner.start_drafts(config.speculation, config.seed)
        set_collective_timeout(group, config)
        gc.collect()
        gc.freeze()
        self._send(RankStage(self._rank, "allocated"))
        return runner

    def _handle_message(self, runner: GroupRunner) -> bool:
        """Execute one message. Return False after LeaveGroup."""
        message = self._receive()
        if isinstance(message, RunStep):
            self._begun_steps[self._rank] = message.step_number
            runner.follow(message.step, message.sampling)
        elif isinstance(message, CompileKernels):
            assert self._compiler is not None
            self._compiler.compile_kernels(runner, message.limits)
            self._compiler.close()
        elif isinstance(message, CaptureGraphs):
            prefill = "no-prefill-graphs" not in self._config.debug
            capture_all = has_budget(self._config, runner.device)
            runner.capture_graphs(lambda _stage, _fraction: None, prefill=prefill, capture_all=capture_all)
        return not isinstance(message, LeaveGroup)

    def _count_progress(self, _stage: str, _fraction: float) -> None:
        self._progress[self._rank] += 1

    def _receive(self) -> ToRank:
        """Wait for the next message from rank 0.

        There is no time limit, because the end of rank 0 ends this process.
        """
        message: ToRank = decoder_on_rank.decode(self._receiver.recv())
        return message

    def _send(self, message: FromRank) -> None:
        self._sender.send(encoder.encode(message))


def main() -> int:
    """Run the rank of this process. Return the exit status."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # rank 0 decides when this process ends
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    line = sys.stdin.buffer.readline()
    if not line:  # rank 0 ended before it had read its own settings
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    config = msgspec.json.decode(line, type=EngineConfig)
    torch.set_num_threads(max(1, (len(os.sched_getaffinity(0)) - 1) // config.tensor_parallel_size))
    threading.Thread(target=_exit_with_rank_0, args=(folder,), daemon=True).start()
    return RankProcess(folder, rank, config).serve()


def _exit_with_rank_0(folder: Path) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # rank 0 does so itself, unless it was killed
    os._exit(0)
