"""Runs the engine behind two pipes, for measurements from outside: `python -m meltcore.engine.generation`.

The first line of the standard input is an EngineConfig; `protocol/json_lines.py` describes all others. The end of the
standard input ends the process.
"""

from __future__ import annotations

import gc
import os
import queue
import signal
import sys
import threading
from typing import BinaryIO

import msgspec
import torch

from meltcore.common.code_version import code_version
from meltcore.common.errors import MeltcoreError, RankError, RequestError
from meltcore.common.host_memory import keep_freed_memory
from meltcore.engine.generation.engine import GenerationEngine
from meltcore.protocol.generation import AddRequest, StepOutputs
from meltcore.protocol.json_lines import (
    Abort,
    FailedLine,
    FromEngineLine,
    LoadingLine,
    ReadyLine,
    RefusedLine,
    StepLine,
    ToEngineLine,
    decode_request,
    encode,
)
from meltcore.protocol.sampling_params import SamplingParams
from meltcore.settings.config import EngineConfig

# The folders whose code makes the tokens: two engines are the same where these are.
_ENGINE_CODE = ("protocol", "engine", "models", "layers", "kernels")


class JsonLines:
    """Passes lines between two pipes and an engine."""

    def __init__(self, requests: queue.SimpleQueue[ToEngineLine], out: BinaryIO) -> None:
        self._requests = requests
        self._out = out

    def serve(self, config: EngineConfig) -> int:
        """Load the engine, then run steps until the thread that reads the input ends the process.

        Returns only after a failure, with the exit status 1.
        """
        try:
            engine = GenerationEngine(config, progress=lambda stage, fraction: self._send(LoadingLine(stage, fraction)))
        except MeltcoreError as error:
            self._send(FailedLine(" ".join(str(error).split())))
            return 1
        # The objects of the loaded engine live as long as the process: the collector need not traverse them again.
        gc.collect()
        gc.freeze()
        self._send(_ready_line(engine))
        try:
            while True:
                self._receive(engine)
                self._report(engine.step())
        except BrokenPipeError:
            return 1  # the reader is gone
        except RankError as error:
            self._send(FailedLine(str(error)))
            engine.close()
            os._exit(1)  # a collective that a rank never joined may hold the device for ever
        except Exception as error:
            self._send(FailedLine(f"a step failed: {type(error).__name__}: {error}"))
            raise

    def _receive(self, engine: GenerationEngine) -> None:
        """Handle the requests received so far. If the engine has no work, wait for a request."""
        while not (engine.has_work and self._requests.empty()):
            message = self._requests.get()
            if isinstance(message, Abort):
                engine.abort(map(str, message.ids))
                continue
            try:
                sampling = SamplingParams(
                    max_tokens=message.max_tokens, temperature=message.temperature, ignore_eos=True
                )
                engine.add(AddRequest(str(message.id), message.prompt, sampling))
            except RequestError as error:
                self._send(RefusedLine(message.id, error.message))

    def _report(self, step: StepOutputs) -> None:
        if not step.outputs:
            return
        with_tokens = [output for output in step.outputs if output.token_ids]
        finished: list[tuple[int, str]] = [
            (int(output.request_id), output.finish_reason) for output in step.outputs if output.finish_reason
        ]
        ids = [int(output.request_id) for output in with_tokens]
        self._send(StepLine(step.step_ended_s, ids, [output.token_ids for output in with_tokens], finished))

    def _send(self, message: FromEngineLine) -> None:
        self._out.write(encode(message) + b"\n")
        self._out.flush()


def _ready_line(engine: GenerationEngine) -> ReadyLine:
    ready = engine.ready()
    return ReadyLine(
        version=code_version(*_ENGINE_CODE),
        device=ready.device,
        dtype=ready.dtype,
        weight_source=ready.weights,
        num_parameters=sum(tensor.shape.numel() for tensor in engine.runner.model.checkpoint_tensors().values()),
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_model_len,
        max_num_seqs=ready.max_num_seqs,
        num_pages=ready.num_pages,
        page_size=ready.page_size,
        load_s=ready.load_s,
    )


def _read_requests(stdin_lines: BinaryIO, requests: queue.SimpleQueue[ToEngineLine]) -> None:
    """Decode every line into `requests`. Ends the process at the end of the input or at an invalid line."""
    for line in stdin_lines:
        try:
            requests.put(decode_request(line))
        except msgspec.MsgspecError as error:
            sys.stderr.write(f"meltcore: an input line cannot be decoded: {error}\n")
            sys.stderr.flush()
            os._exit(2)
    os._exit(0)


def main() -> int:
    """Serve requests from the pipes of this process. Return the exit status."""
    # Standard output carries JSON lines only: what a library prints goes to standard error.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # On a CPU the measuring program needs a core too.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    keep_freed_memory()
    # The parent decides when this process ends; a Ctrl-C in its terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A descriptor of its own: at exit the interpreter takes sys.stdin's lock, which a thread that reads it would hold.
    stdin_lines = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    config = msgspec.json.decode(stdin_lines.readline(), type=EngineConfig)
    requests: queue.SimpleQueue[ToEngineLine] = queue.SimpleQueue()
    threading.Thread(target=_read_requests, args=(stdin_lines, requests), daemon=True).start()
    return JsonLines(requests, out).serve(config)
