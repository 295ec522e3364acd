"""The engine behind two pipes, for whoever wants to measure it from outside: `python -m meltcore.engine.json_lines`.

In, one JSON object a line: first an EngineConfig, then any number of

    {"type": "generate", "id": 7, "prompt": [1015, 88], "max_tokens": 128}    greedy, end tokens ignored
    {"type": "abort", "ids": [7]}

Out, one JSON object a line: "loading" while starting, "ready" once, then a "step" for each step that gave something,
holding all outputs of that step; "refused" for a request that cannot be served, "failed" where the engine cannot start
or go on. `t_s` is `time.monotonic()`, one clock for all processes of a machine, read when the tokens were on the host.
An id may be used again after its request ended. The end of the standard input ends the process at once.
"""

from __future__ import annotations

import gc
import hashlib
import os
import queue
import signal
import sys
import threading
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch

import meltcore
from meltcore.config import EngineConfig
from meltcore.engine.engine import Engine
from meltcore.engine.host_memory import keep_freed_memory
from meltcore.engine.messages import AddRequest, StepOutputs
from meltcore.engine.sampling_params import SamplingParams
from meltcore.errors import MeltcoreError, RankError, RequestError

# The folders whose code makes the tokens: two engines are the same where these are.
_ENGINE_CODE = ("engine", "models", "layers", "kernels")


class Generate(msgspec.Struct, tag="generate", frozen=True):
    id: int
    prompt: list[int]
    max_tokens: int


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Each that still runs ends with reason "abort"; others are ignored."""

    ids: list[int]


class Loading(msgspec.Struct, tag="loading"):
    stage: str
    fraction: float


class Ready(msgspec.Struct, tag="ready"):
    """`version` is meltcore's with a digest of the engine's code. `parameters` counts the model's as published."""

    version: str
    device: str
    dtype: str
    weights: str
    parameters: int
    vocab_size: int
    max_model_len: int
    max_num_seqs: int
    pages_total: int
    page_size: int
    load_s: float


class Step(msgspec.Struct, tag="step"):
    """`tokens[i]` are new tokens of request `ids[i]`; an id stands once. `ended` are (id, reason) of those over now."""

    t_s: float
    ids: list[int]
    tokens: list[list[int]]
    ended: list[tuple[int, str]]


class Refused(msgspec.Struct, tag="refused"):
    id: int
    error: str


class Failed(msgspec.Struct, tag="failed"):
    message: str


class JsonLines:
    """Moves lines between the pipes and an engine."""

    def __init__(self, inbox: queue.SimpleQueue[Generate | Abort], out: BinaryIO) -> None:
        self._inbox = inbox
        self._out = out
        self._encoder = msgspec.json.Encoder()

    def serve(self, config: EngineConfig) -> int:
        """Load, then step for ever; the thread that reads the input ends the process. Returns only after a failure."""
        try:
            engine = Engine(config, progress=lambda stage, fraction: self._send(Loading(stage, fraction)))
        except MeltcoreError as error:
            self._send(Failed(" ".join(str(error).split())))
            return 1
        # What loading left behind lives as long as the process: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self._send(_ready(engine))
        try:
            while True:
                self._receive(engine)
                self._report(engine.step())
        except BrokenPipeError:
            return 1  # nobody reads any more
        except RankError as error:
            self._send(Failed(str(error)))
            engine.close()
            os._exit(1)  # a collective that a rank never joined may hold the device for ever
        except Exception as error:
            self._send(Failed(f"a step failed: {type(error).__name__}: {error}"))
            raise

    def _receive(self, engine: Engine) -> None:
        """Take in what has come; wait where there is nothing else to do."""
        while not (engine.has_work and self._inbox.empty()):
            message = self._inbox.get()
            if isinstance(message, Abort):
                engine.abort(map(str, message.ids))
                continue
            sampling = SamplingParams(max_tokens=message.max_tokens, ignore_eos=True)
            try:
                engine.add(AddRequest(str(message.id), message.prompt, sampling))
            except RequestError as error:
                self._send(Refused(message.id, error.message))

    def _report(self, step: StepOutputs) -> None:
        if not step.outputs:
            return
        with_tokens = [output for output in step.outputs if output.token_ids]
        ended: list[tuple[int, str]] = [
            (int(output.request_id), output.finish_reason) for output in step.outputs if output.finish_reason
        ]
        ids = [int(output.request_id) for output in with_tokens]
        self._send(Step(step.step_ended_s, ids, [output.token_ids for output in with_tokens], ended))

    def _send(self, message: Loading | Ready | Step | Refused | Failed) -> None:
        self._out.write(self._encoder.encode(message) + b"\n")
        self._out.flush()


def engine_version() -> str:
    """meltcore's version and a digest of the code that makes the tokens: "0.1.0+1f2e3d4c"."""
    root = Path(meltcore.__file__).parent
    digest = hashlib.sha256()
    for folder in _ENGINE_CODE:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root).as_posix()}\n".encode() + path.read_bytes())
    return f"{meltcore.__version__}+{digest.hexdigest()[:8]}"


def _ready(engine: Engine) -> Ready:
    ready = engine.ready()
    return Ready(
        version=engine_version(),
        device=ready.device,
        dtype=ready.dtype,
        weights=ready.weights,
        parameters=sum(part.shape.numel() for part in engine.runner.model.checkpoint_tensors().values()),
        vocab_size=ready.vocab_size,
        max_model_len=ready.max_model_len,
        max_num_seqs=ready.max_num_seqs,
        pages_total=ready.pages_total,
        page_size=ready.page_size,
        load_s=ready.load_s,
    )


def _read(lines: BinaryIO, inbox: queue.SimpleQueue[Generate | Abort]) -> None:
    """Decode every line; leave at the end of the input, or at a line that is none of ours, whatever else runs."""
    decoder = msgspec.json.Decoder(Generate | Abort)
    for line in lines:
        try:
            inbox.put(decoder.decode(line))
        except msgspec.MsgspecError as error:
            sys.stderr.write(f"meltcore: an input line is none of ours: {error}\n")
            sys.stderr.flush()
            os._exit(2)
    os._exit(0)


def main() -> int:
    # Lines of ours alone may go out on standard output: what a library prints goes where errors go.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # On a CPU the measurer needs a core too.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))
    keep_freed_memory()
    # The parent decides when we leave; a Ctrl-C in its terminal reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A reader of our own: at exit the interpreter wants sys.stdin's lock, which a thread that reads it would hold.
    lines = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    config = msgspec.json.decode(lines.readline(), type=EngineConfig)
    inbox: queue.SimpleQueue[Generate | Abort] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(lines, inbox), daemon=True).start()
    return JsonLines(inbox, out).serve(config)


if __name__ == "__main__":
    sys.exit(main())
