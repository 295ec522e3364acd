"""An engine without a model: it uses the real protocol and repeats the prompt's tokens as its answer.

`scripted_engine.py [options] SOCKET_DIR CLIENT_COUNT`. Options set the times and the faults of a test. A prompt
that begins with `ERROR_TOKEN` is refused, as the engine refuses a request that it cannot run.
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

import msgspec

from meltcore.common.process import start_ticks
from meltcore.engine.host import client_sockets
from meltcore.protocol.generation import (
    AddRequest,
    EngineStats,
    FromEngine,
    GenerationReady,
    RequestTimes,
    SequenceOutput,
    StepOutputs,
    ToEngine,
    TokenLogprobs,
)
from meltcore.protocol.shell import (
    AbortRequests,
    Asleep,
    Awake,
    EngineFailed,
    ForgetClient,
    Loading,
    MemoryRow,
    Profile,
    ProfileDone,
    Shutdown,
    Sleep,
    Wake,
)
from meltcore.protocol.tcp import is_remote
from meltcore.settings.config import EngineConfig

ERROR_TOKEN = 0
MAX_MODEL_LEN = 4096
VOCAB_SIZE = 512
client_sockets.ORPHAN_S = 4.0  # tests wait for the end of engines that have lost their server


class Running:
    """One request: where its echo is, and when it was first scheduled."""

    def __init__(self, request: AddRequest, end_ids: set[int]) -> None:
        self.request = request
        self.ends = {*request.sampling.stop_token_ids} | (set() if request.sampling.ignore_eos else end_ids)
        self.generated = 0
        self.scheduled_s = time.monotonic()
        self.first_token_s = 0.0

    def step(self, tokens: int) -> SequenceOutput:
        request, sampling = self.request, self.request.sampling
        if request.prompt[0] == ERROR_TOKEN:
            return SequenceOutput(request.request_id, [], finish_reason="error", error="scripted failure")
        now_s = time.monotonic()
        self.first_token_s = self.first_token_s or now_s
        ids: list[int] = []
        reason, stop_id = None, None
        while reason is None and len(ids) < tokens:
            ids.append(request.prompt[self.generated % len(request.prompt)])
            self.generated += 1
            if ids[-1] in self.ends and self.generated > sampling.min_tokens:
                reason, stop_id = "stop", ids[-1]
            elif self.generated == sampling.max_tokens:
                reason = "length"
        logprobs = None
        if sampling.logprobs is not None:
            top = sampling.logprobs
            logprobs = [
                TokenLogprobs(-0.5, [token, 300, 301][:top], [-0.5, -1.5, float("-inf")][:top]) for token in ids
            ]
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and self.generated == len(ids):
            best = sampling.prompt_logprobs
            prompt_logprobs = [TokenLogprobs(-0.25, [token][:best], [-0.25][:best]) for token in request.prompt[1:]]
        times = RequestTimes(request.arrived_s, self.scheduled_s, self.first_token_s, now_s) if reason else None
        return SequenceOutput(request.request_id, ids, reason, stop_id, logprobs, 0, None, times, prompt_logprobs)


class ScriptedEngine:
    def __init__(self, options: argparse.Namespace, config: EngineConfig) -> None:
        self.options = options
        self.config = config
        self.max_num_seqs = config.max_num_seqs or 256
        self.waiting: list[AddRequest] = []
        self.running: dict[str, Running] = {}
        self.generated = 0
        self.steps = 0
        self.sockets = client_sockets.open_sockets(Path(options.directory), options.client_count, ToEngine)
        self.client_of: dict[str, int] = {}
        self.is_asleep = False
        description = Path(config.model) / "config.json"
        found = json.loads(description.read_bytes()).get("eos_token_id") if description.exists() else None
        self.end_ids = set(found if isinstance(found, list) else [found])

    def send(self, message: FromEngine, client_index: int = 0) -> None:
        self.sockets.send(client_index, message)

    def send_outputs(self, outputs: list[SequenceOutput]) -> None:
        parts: list[list[SequenceOutput]] = [[] for _ in range(self.sockets.client_count)]
        for output in outputs:
            parts[self.client_of[output.request_id]].append(output)
        for client_index, part in enumerate(parts):
            if part or (client_index == 0 and not outputs):
                self.send(StepOutputs(part, self.stats(), time.monotonic()), client_index)

    def serve(self) -> int:
        if self.options.say:
            print(self.options.say)
        self.send(Loading("scripted", 0.5))
        time.sleep(self.options.load_s)
        while (Path(self.config.model) / "hold").exists():  # a test removes it
            time.sleep(0.01)
        if self.options.fail and self.options.fail_of in ("", Path(self.options.directory).name):
            self.send(EngineFailed(self.options.fail))
            return 1
        if self.options.die_loading:
            return 3
        length = self.config.max_model_len or MAX_MODEL_LEN
        memory = [MemoryRow("weights", 0, "none"), MemoryRow("KV pages", 2**20)]
        self.take_memory()
        limits = (length, self.max_num_seqs, VOCAB_SIZE, 64, 64)
        self.send(GenerationReady("CPU", "float32", "dummy", memory, 0.0, *limits, ["float32"], "float32", "none"))
        while self.receive():
            if self.running or self.waiting:
                self.step()
        return 0

    def receive(self) -> bool:
        if not (self.running or self.waiting):
            self.sockets.poll(1000)
        return all(
            self.handle(message, client_index)
            for client_index in range(self.sockets.client_count)
            for message in self.take(client_index)
        )

    def take(self, client_index: int) -> list[ToEngine]:
        messages: list[ToEngine] = []
        while (arrived := self.sockets.receive(client_index)) is not None:
            messages += arrived
        return messages

    def handle(self, message: ToEngine, client_index: int) -> bool:
        if isinstance(message, AddRequest):
            assert not self.is_asleep, "a request for an engine that sleeps"
            if not message.prompt_token_ids:  # of one of several answers
                open_requests = [*self.waiting, *(each.request for each in self.running.values())]
                [leader] = [each for each in open_requests if each.request_id == message.leader_id]
                message = msgspec.structs.replace(message, prompt_token_ids=leader.prompt_token_ids)
            self.waiting.append(message)
            self.client_of[message.request_id] = client_index
        elif isinstance(message, AbortRequests):
            self.abort(message.request_ids)
        elif isinstance(message, ForgetClient):
            orphans = [request_id for request_id, owner in self.client_of.items() if owner == message.client_index]
            self.client_of.update(dict.fromkeys(orphans, client_index))
            self.abort(orphans)
        elif isinstance(message, Profile):
            self.send(ProfileDone(message.directory or message.profiler), client_index)
        elif isinstance(message, Sleep):
            self.send(self.sleep(message), client_index)
        elif isinstance(message, Wake):
            self.send(self.wake(), client_index)
        return not isinstance(message, Shutdown)

    def take_memory(self) -> None:
        """Note the memory in the folder of all engines of a device; it must be that of one."""
        if self.options.device_folder:
            folder = Path(self.options.device_folder)
            holders = [path.name for path in folder.glob("[0-9]*") if start_ticks(int(path.name)) is not None]
            if holders:
                (folder / "overcommitted").write_text(f"{os.getpid()} beside {holders}")
            (folder / str(os.getpid())).touch()

    def free_memory(self) -> None:
        if self.options.device_folder:
            (Path(self.options.device_folder) / str(os.getpid())).unlink()

    def sleep(self, message: Sleep) -> Asleep:
        if self.options.no_sleep or self.running or self.waiting:
            return Asleep(0, 0.0, error="scripted engine without a sleep mode" if self.options.no_sleep else "busy")
        self.free_memory()
        self.is_asleep = True
        return Asleep(2**20, 0.0, 4096 if message.keep == "host" else 0)

    def wake(self) -> Awake:
        assert self.is_asleep
        faults = Path(self.config.model) / "wake_faults"  # one line for each wake that goes wrong
        lines = faults.read_text().splitlines() if faults.exists() else []
        if lines:
            faults.write_text("\n".join(lines[1:]))
            if lines[0] == "die":
                os._exit(9)
            return Awake(0.0, 0, lines[0])
        time.sleep(self.options.wake_s)
        self.take_memory()
        self.is_asleep = False
        return Awake(0.0, 2**20)

    def abort(self, request_ids: list[str]) -> None:
        if self.options.abort_log:
            with Path(self.options.abort_log).open("a") as log:
                log.write(f"{time.monotonic()}\n" * len(request_ids))
        ended = [request_id for request_id in request_ids if self.running.pop(request_id, None)]
        ended += [request.request_id for request in self.waiting if request.request_id in request_ids]
        self.waiting = [request for request in self.waiting if request.request_id not in request_ids]
        self.send_outputs([SequenceOutput(request_id, [], finish_reason="abort") for request_id in ended])

    def step(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            request = self.waiting.pop(0)
            self.running[request.request_id] = Running(request, self.end_ids)
        time.sleep(self.options.step_s)
        if self.steps + 1 == self.options.die_at_step:
            os._exit(7)
        if self.steps < self.options.silent_steps:
            self.steps += 1
            return
        outputs = [running.step(self.options.tokens_per_step) for running in self.running.values()]
        for output in outputs:
            self.generated += len(output.token_ids)
            if output.finish_reason is not None:
                del self.running[output.request_id]
        self.steps += 1
        self.send_outputs(outputs)

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_used=len(self.running),
            num_pages=64,
            generated_tokens_total=self.generated,
        )


def exit_with_api_server() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--step-s", type=float, default=0.002)
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--say", default="", help="printed at the start")
    parser.add_argument("--fail", default="", help="say this instead of becoming ready")
    parser.add_argument("--fail-of", default="", help="the number of the only engine that says it")
    parser.add_argument("--die-loading", action="store_true")
    parser.add_argument("--die-at-step", type=int, default=0)
    parser.add_argument("--tokens-per-step", type=int, default=1)
    parser.add_argument("--silent-steps", type=int, default=0, help="steps without any output at the start")
    parser.add_argument("--device-folder", default="", help="of engines that take turns: a file for each awake one")
    parser.add_argument("--abort-log", default="", help="a file for the time of each abort")
    parser.add_argument("--no-sleep", action="store_true")
    parser.add_argument("--wake-s", type=float, default=0.0)
    parser.add_argument("directory")
    parser.add_argument("client_count", type=int)
    options = parser.parse_args()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=EngineConfig)
    Path("/proc/self/comm").write_text(Path(config.model).name)  # as engines do
    own_options = Path(config.model) / "engine.json"  # of one model of several, read at each start
    if own_options.exists():
        vars(options).update(msgspec.json.decode(own_options.read_bytes()))
    if not is_remote(Path(options.directory)):
        threading.Thread(target=exit_with_api_server, daemon=True).start()
    return ScriptedEngine(options, config).serve()


if __name__ == "__main__":
    sys.exit(main())
