"""A cluster without machines: answers the lines of `protocol/cluster.py` as the driver of a Ray cluster does.

`python -m simulated_cluster RACKSxNODESxGPUS` is the driver: nodes n00, n01 and so on with GPUs of 40 GiB. One process
per rack holds all engines of its nodes. Each has a socket of its own with CURVE and heartbeats, and steps at times of
its own: every request is given SIMULATED_STEP_TOKENS tokens. A request with `ignore_eos` gets all that it allows; the
answers of others end at a length drawn from 32 to 1,024 tokens. A rack that is killed takes its nodes out of the
cluster. In the folder SIMULATED_STEPS each rack writes a line per step (see `Step`).
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import zmq

from meltcore.common.gpus.machine import Machine, VisibleGpu
from meltcore.common.process import KILL_LIMIT_S, end_async, start_async
from meltcore.fleet.plan.machine import unloadable
from meltcore.protocol.cluster import (
    ClusterNode,
    EngineEnded,
    EngineListening,
    FromDriver,
    KillEngine,
    Nodes,
    Ping,
    Pong,
    ReadNodes,
    StartEngine,
    ToDriver,
)
from meltcore.protocol.generation import (
    AddRequest,
    EngineStats,
    FinishReason,
    GenerationReady,
    RequestTimes,
    SequenceOutput,
    StepOutputs,
    ToEngine,
)
from meltcore.protocol.shell import AbortRequests, ForgetClient, Loading, MemoryRow, Shutdown
from meltcore.protocol.tcp import KeyPair, Listening, client_identity, decode_message, encode_message, set_heartbeats

GIB = 2**30
GPU_GIB = 40
STEP_S = float(os.environ.get("SIMULATED_STEP_S", "2"))
STEP_TOKENS = int(os.environ.get("SIMULATED_STEP_TOKENS", "1"))
LOAD_S = float(os.environ.get("SIMULATED_LOAD_S", "1"))
STEPS_FOLDER = os.environ.get("SIMULATED_STEPS")
OUTPUT_TOKENS = (32, 1024)  # of an answer that ends by itself
VOCAB_SIZE, MAX_MODEL_LEN = 512, 4096
_HOST = "127.0.0.1"


class Step(NamedTuple):
    """What an engine had to do at a step: open requests, the tokens that they still get, and those that they hold."""

    time_s: float  # monotonic
    model: str
    engine: int
    requests: int
    left_tokens: int
    held_tokens: int


class Running:
    """A request that an engine works on."""

    __slots__ = ("arrived_s", "client", "first_token_s", "length", "prompt", "reason", "scheduled_s", "tokens")

    def __init__(self, request: AddRequest, client: int, drawn_tokens: int) -> None:
        self.client, self.arrived_s, self.prompt = client, request.arrived_s, request.prompt
        most = request.sampling.max_tokens
        self.length = most if request.sampling.ignore_eos else min(most, drawn_tokens)
        self.reason: FinishReason = "length" if self.length == most else "stop"
        self.tokens = 0
        self.scheduled_s, self.first_token_s = time.monotonic(), 0.0


class Engine:
    """One engine of a rack. Its times are those of the rack's loop."""

    def __init__(self, start: StartEngine, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.start = start
        self._random = random.Random(start.engine)
        self.phase_s = self._random.random() * STEP_S
        self.socket = socket = context.socket(zmq.ROUTER)
        socket.set_hwm(0)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.curve_server = True
        keys = KeyPair.generate()
        socket.curve_publickey, socket.curve_secretkey = keys.public.encode(), keys.secret.encode()
        set_heartbeats(socket)
        self.listening = Listening(socket.bind_to_random_port(f"tcp://{_HOST}"), keys.public)
        self.identities = [client_identity(index) for index in range(start.client_count)]
        self.running: dict[str, Running] = {}
        self.is_loaded = self.is_asked = False
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, client: int, message: Any) -> None:
        self.socket.send_multipart([self.identities[client], encode_message(self._encoder, message)])

    def load(self) -> None:
        limits = (MAX_MODEL_LEN, self.start.config.max_num_seqs or 256, VOCAB_SIZE, 64, 64)
        memory = [MemoryRow("weights", 0, "none"), MemoryRow("KV pages", 2**20)]
        self.send(0, GenerationReady("CPU", "float32", "dummy", memory, 0.0, *limits, ["float32"], "float32", "none"))
        self.is_loaded = True

    def handle(self, client: int, message: Any) -> None:
        if isinstance(message, AddRequest):
            self.running[message.request_id] = Running(message, client, self._random.randint(*OUTPUT_TOKENS))
        elif isinstance(message, AbortRequests):
            for request_id in message.request_ids:
                self.running.pop(request_id, None)
        elif isinstance(message, ForgetClient):
            self.running = {name: each for name, each in self.running.items() if each.client != message.client_index}

    def look(self) -> Step:
        """Return what the next step finds."""
        left = sum(each.length - each.tokens for each in self.running.values())
        held = sum(len(each.prompt) + each.tokens for each in self.running.values())
        name, number = self.start.model, self.start.engine
        return Step(time.monotonic(), name, number, len(self.running), left, held)

    def until_step_s(self) -> float:
        """Return the time until the next step: engines step at times of their own, not together."""
        wait_s = STEP_S - (time.monotonic() - self.phase_s) % STEP_S
        return wait_s if wait_s > STEP_S / 100 else wait_s + STEP_S  # this one has just been made

    def step(self) -> None:
        parts: dict[int, list[SequenceOutput]] = {}
        now_s = time.monotonic()
        for request_id, entry in list(self.running.items()):
            reason, times = None, None
            new_tokens = min(STEP_TOKENS, entry.length - entry.tokens)
            entry.tokens += new_tokens
            entry.first_token_s = entry.first_token_s or now_s
            if entry.tokens == entry.length:
                reason = entry.reason
                times = RequestTimes(entry.arrived_s, entry.scheduled_s, entry.first_token_s, now_s)
                del self.running[request_id]
            token = entry.prompt[entry.tokens % len(entry.prompt)]
            output = SequenceOutput(request_id, [token] * new_tokens, reason, times=times)
            parts.setdefault(entry.client, []).append(output)
        stats = EngineStats(running=len(self.running))
        for client, outputs in parts.items():
            self.send(client, StepOutputs(outputs, stats, now_s))


class Rack:
    """All engines of a rack, on one thread: what has arrived, then the steps that are due."""

    def __init__(self, steps: IO[bytes] | None) -> None:
        """Create a rack without engines. steps: gets a line per step."""
        self._steps = steps
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._poller.register(sys.stdin.fileno(), zmq.POLLIN)
        self._engines: dict[zmq.Socket[bytes], Engine] = {}
        self._due: list[tuple[float, int, Engine]] = []
        self._decoder = msgspec.msgpack.Decoder(list[ToEngine])
        self._lines = b""

    def run(self) -> None:
        """Serve until the end of the input."""
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else 1.0
            for source, _ in self._poller.poll(wait_s * 1000):
                if isinstance(source, int):
                    block = os.read(source, 2**20)
                    if not block:
                        return
                    *lines, self._lines = (self._lines + block).split(b"\n")
                    for line in lines:
                        self._on_line(msgspec.json.decode(line, type=ToDriver))
                elif (engine := self._engines.get(source)) is not None:
                    self._receive(engine)
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                self._step(heapq.heappop(self._due)[2])

    def _on_line(self, message: ToDriver) -> None:
        if isinstance(message, StartEngine):
            engine = Engine(message, self._context)
            self._engines[engine.socket] = engine
            self._poller.register(engine.socket, zmq.POLLIN)
            answer(EngineListening(message.engine, _HOST, engine.listening, os.getpid()))
        elif isinstance(message, KillEngine):
            for engine in list(self._engines.values()):
                if engine.start.engine == message.engine:
                    self._end(engine, "killed by signal 9")

    def _receive(self, engine: Engine) -> None:
        while engine.socket in self._engines and engine.socket.poll(0):
            identity, data = engine.socket.recv_multipart()
            client = engine.identities.index(identity)
            if client == 0 and not engine.is_asked:
                engine.is_asked = True
                engine.send(0, Loading("simulated", 0.5))
                self._schedule(engine, LOAD_S)
            messages, _ = decode_message(self._decoder, data)
            was_idle = not engine.running
            for message in messages:
                if isinstance(message, Shutdown):
                    self._end(engine, "exit status 0")
                    return
                engine.handle(client, message)
            if was_idle and engine.running:
                self._schedule(engine, engine.until_step_s())

    def _schedule(self, engine: Engine, wait_s: float) -> None:
        heapq.heappush(self._due, (time.monotonic() + wait_s, id(engine), engine))

    def _step(self, engine: Engine) -> None:
        if engine.socket not in self._engines:
            return
        if not engine.is_loaded:
            engine.load()
            return
        if self._steps is not None and engine.running:
            self._steps.write(msgspec.json.encode(engine.look()) + b"\n")
        engine.step()
        if engine.running:
            self._schedule(engine, engine.until_step_s())

    def _end(self, engine: Engine, how: str) -> None:
        self._poller.unregister(engine.socket)
        del self._engines[engine.socket]
        engine.socket.close()
        answer(EngineEnded(engine.start.engine, how))


class Driver:
    """Answers for all nodes, and passes what is for an engine to the process of its rack."""

    def __init__(self, racks: int, nodes: int, gpus: int) -> None:
        self._nodes_per_rack, self._gpus = nodes, gpus
        self._living = {f"n{number:02}": number // nodes for number in range(racks * nodes)}
        self._racks: dict[int, asyncio.subprocess.Process] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._engines: dict[int, StartEngine] = {}
        self._listening: set[int] = set()

    async def run(self) -> None:
        """Answer until the end of the input, then end all racks."""
        while line := await asyncio.to_thread(sys.stdin.buffer.readline):
            message = msgspec.json.decode(line, type=ToDriver)
            if isinstance(message, Ping):
                answer(Pong())
            elif isinstance(message, ReadNodes):
                answer(Nodes([self._node(name, message.checkpoints) for name in sorted(self._living)]))
            elif isinstance(message, KillEngine):
                if (start := self._engines.get(message.engine)) is not None and start.node in self._living:
                    self._write(self._living[start.node], line)
            elif message.node not in self._living:
                answer(EngineEnded(message.engine, f"the node {message.node} is gone", no_room=True))
            else:
                self._engines[message.engine] = message
                rack = self._living[message.node]
                if rack not in self._racks:
                    await self._start_rack(rack)
                self._write(rack, line)
        await asyncio.gather(*(self._end_rack(process) for process in self._racks.values()))

    def _node(self, name: str, checkpoints: list[str]) -> ClusterNode:
        given = [0] * self._gpus
        for start in self._engines.values():
            for gpu in start.gpus if start.node == name else []:
                given[gpu] += start.config.memory_bytes or 0
        cards = tuple(
            VisibleGpu(number, "NVIDIA Simulated", GPU_GIB * GIB, GIB // 2 + taken)
            for number, taken in enumerate(given)
        )
        gib = dict.fromkeys(range(self._gpus), float(GPU_GIB))
        return ClusterNode(name, name, _HOST, Machine(cards, "570.1", 64 * GIB), gib, unloadable(checkpoints))

    def _write(self, rack: int, line: bytes) -> None:
        stdin = self._racks[rack].stdin
        assert stdin is not None
        stdin.write(line)

    async def _start_rack(self, rack: int) -> None:
        command = [sys.executable, "-m", "simulated_cluster", "--rack", str(rack)]
        self._racks[rack] = await start_async(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        task = asyncio.create_task(self._follow(rack, self._racks[rack]))
        self._tasks.add(task)

    async def _follow(self, rack: int, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            message = msgspec.json.decode(line, type=FromDriver)
            if isinstance(message, EngineListening):
                self._listening.add(message.engine)
            elif isinstance(message, EngineEnded):
                self._engines.pop(message.engine, None)
            answer(message)
        lost = {name for name, its_rack in self._living.items() if its_rack == rack}
        self._living = {name: its_rack for name, its_rack in self._living.items() if its_rack != rack}
        for number in [number for number, start in self._engines.items() if start.node in lost]:
            node = self._engines.pop(number).node
            answer(EngineEnded(number, f"the node {node} is gone", no_room=number not in self._listening))

    async def _end_rack(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        await end_async(process, KILL_LIMIT_S)


def answer(message: FromDriver) -> None:
    """Write a line to who has started this process."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


def main() -> int:
    """Be the driver of a cluster, or one of its racks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("size", nargs="?", metavar="RACKSxNODESxGPUS", help="be the driver of a cluster of this size")
    what.add_argument("--rack", type=int, metavar="NUMBER", help="be one rack of it; its driver starts it")
    args = parser.parse_args()
    if args.rack is not None:
        Rack(None if STEPS_FOLDER is None else (Path(STEPS_FOLDER) / f"rack-{args.rack}.jsonl").open("ab", 0)).run()
        os._exit(0)  # its connections need no farewell
    asyncio.run(Driver(*map(int, args.size.split("x"))).run())
    return 0


if __name__ == "__main__":
    sys.exit(main())
