"""A scripted engine behind the JSON lines protocol, faults included.

Every step gives one token to each running request and is written to `log` as it is sent, after the configuration and
the environment. A fault comes `after_s` after the first request behind a warm-up, or with the first request of all
where that is 0. It comes where `only` is None or the GPU that the engine sees.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

READY = {"type": "ready", "version": "0.1.0+scripted", "device": "CPU", "dtype": "bfloat16", "weights": "dummy",
         "parameters": 596_049_920, "vocab_size": 151_936, "max_num_seqs": 64}  # fmt: skip


def program(log: Path, **script: Any) -> tuple[str, ...]:
    """Its command. `period_s` per step; `fault` one of the names below; `ready` replaces fields of READY."""
    defaults = {"log": str(log), "period_s": 0.01, "fault": None, "after_s": 0.0, "only": None, "ready": {}}
    return sys.executable, __file__, json.dumps(defaults | script)


class Engine:
    def __init__(self, script: dict[str, Any]) -> None:
        self.script = script
        if script["only"] not in (None, os.environ.get("CUDA_VISIBLE_DEVICES")):
            script["fault"] = None
        log = Path(f"{script['log']}.{os.environ.get('CUDA_VISIBLE_DEVICES', 'cpu')}")
        self.log = log.open("w")
        self.requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.running: dict[int, int] = {}  # tokens so far
        self.limits: dict[int, int] = {}
        self.waiting: list[int] = []
        self.began_s: float | None = None
        self.num_ended = 0
        self.faulted = False

    def send(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        self.log.write(text + "\n")
        self.log.flush()
        sys.stdout.write(text + "\n")
        sys.stdout.flush()

    def serve(self) -> None:
        ready = READY | self.script["ready"]
        self.send(ready)
        while True:
            self.receive()
            time.sleep(self.script["period_s"])
            self.step(ready["max_num_seqs"])

    def receive(self) -> None:
        while not self.requests.empty() or not (self.running or self.waiting):
            message = self.requests.get()
            if message["type"] == "abort":
                self.abort(message["ids"])
                continue
            # On a busy machine the warm-up takes any time. A fault that comes later is due when it has ended.
            if self.began_s is None and (self.num_ended or not self.script["after_s"]):
                self.began_s = time.monotonic()
            self.waiting.append(message["id"])
            self.limits[message["id"]] = message["max_tokens"]

    def abort(self, ids: list[int]) -> None:
        open_ids = [number for number in ids if number in self.running or number in self.waiting]
        self.running = {number: count for number, count in self.running.items() if number not in open_ids}
        self.waiting = [number for number in self.waiting if number not in open_ids]
        self.send({"type": "step", "t_s": time.monotonic(), "ids": [], "tokens": [],
                   "ended": [(number, "abort") for number in open_ids]})  # fmt: skip

    def step(self, most: int) -> None:
        while self.waiting and len(self.running) < most:
            self.running[self.waiting.pop(0)] = 0
        ids = list(self.running)
        ended = []
        for number in ids:
            self.running[number] += 1
            if self.running[number] == self.limits[number]:
                ended.append([number, "length"])
                del self.running[number]
                self.num_ended += 1
        step = {"type": "step", "t_s": time.monotonic(), "ids": ids, "tokens": [[5] for _ in ids], "ended": ended}
        if self.due():
            self.faulted = True
            step = getattr(self, self.script["fault"])(step)
        self.send(step)

    def due(self) -> bool:
        if self.script["fault"] is None or self.faulted or self.began_s is None:
            return False
        return time.monotonic() - self.began_s >= self.script["after_s"]

    # --- faults: each receives the due step and returns what is sent instead

    def die(self, step: dict[str, Any]) -> dict[str, Any]:
        sys.stderr.write("CUDA error: an illegal memory access was encountered\n")
        sys.stderr.flush()
        os._exit(7)

    def be_killed(self, step: dict[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), 9)
        return step

    def stall(self, step: dict[str, Any]) -> dict[str, Any]:
        time.sleep(3600)
        return step

    def too_few(self, step: dict[str, Any]) -> dict[str, Any]:
        number = step["ids"][0]
        self.running.pop(number, None)
        return step | {"ended": [[number, "length"]]}

    def too_many(self, step: dict[str, Any]) -> dict[str, Any]:
        return step | {"tokens": [[5] * 200 for _ in step["ids"]]}

    def wrong_id(self, step: dict[str, Any]) -> dict[str, Any]:
        return step | {"ids": [999_999, *step["ids"][1:]]}

    def twice(self, step: dict[str, Any]) -> dict[str, Any]:
        return step | {"ids": step["ids"] * 2, "tokens": step["tokens"] * 2}

    def future(self, step: dict[str, Any]) -> dict[str, Any]:
        return step | {"t_s": step["t_s"] + 60}

    def past(self, step: dict[str, Any]) -> dict[str, Any]:
        return step | {"t_s": step["t_s"] - 60}

    def garbage(self, step: dict[str, Any]) -> dict[str, Any]:
        return {"type": "step", "t_s": "soon"}

    def refuse(self, step: dict[str, Any]) -> dict[str, Any]:
        return {"type": "refused", "id": step["ids"][0], "error": "the prompt is too long"}

    def fail(self, step: dict[str, Any]) -> dict[str, Any]:
        return {"type": "failed", "message": "a step failed: OutOfMemoryError: CUDA out of memory"}


def read(engine: Engine) -> None:
    for line in sys.stdin.buffer:
        engine.requests.put(json.loads(line))
    os._exit(0)


def main() -> None:
    engine = Engine(json.loads(sys.argv[1]))
    config = json.loads(sys.stdin.buffer.readline())
    engine.log.write(json.dumps({"config": config, "gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\n")
    if engine.script["fault"] == "fail_at_start":
        engine.send({"type": "failed", "message": "6 GiB do not hold the weights"})
        return
    threading.Thread(target=read, args=(engine,), daemon=True).start()
    if engine.script["fault"] == "never_ready":
        threading.Event().wait()
    engine.serve()


if __name__ == "__main__":
    main()
