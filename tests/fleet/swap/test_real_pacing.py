"""Step pacing in a fleet of real engines that share one core: what a busy neighbor costs interactive requests.

Time is that which the core gave to the engines: other processes of the machine do not count, only the neighbor does.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from server_harness import RunningServer, running
from waiting import WAIT_S

from meltcore.models.checkpoints.checkpoint import BUNDLED_MODEL

pytestmark = pytest.mark.slow
ROUNDS, REQUESTS = 3, 8
SERVE = "import sys; from meltcore.cli.main import main; sys.exit(main(sys.argv[1:]))"


def complete(server: RunningServer, model: str, max_tokens: int) -> float:
    """Return the seconds of a request in which the engines computed."""
    body = {"model": model, "prompt": "What is 7 * 8?", "max_tokens": max_tokens, "ignore_eos": True}
    began_s = computed_s(server)
    answer = server.post("/v1/completions", body)
    assert answer.status == 200, answer.body
    return computed_s(server) - began_s


def computed_s(server: RunningServer) -> float:
    """CPU time of all engines so far, by the kernel's clock of each process (`CPUCLOCK_SCHED`)."""
    return sum(time.clock_gettime((~pid << 3) | 2) for pid in server.engine_pids())


@contextmanager
def busy(server: RunningServer, model: str) -> Iterator[list[float]]:
    """Keep an engine at work; yields a list that grows with each of its requests that ends."""
    took: list[float] = []
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            took.append(complete(server, model, 16))

    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(run) for _ in range(2)]
        try:
            time.sleep(0.1)
            yield took
        finally:
            stop.set()
    for each in runs:
        each.result()


def share_one_core(server: RunningServer) -> None:
    """Let all engines compute on one core, as they would on one GPU."""
    core = {max(os.sched_getaffinity(0))}
    for pid in server.engine_pids():
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), core)


def test_interactive_latency_beside_a_lower_class_and_beside_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine of class batch waits for the interactive one; one of its own class does not, as without pacing."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    classes = {"chat": "interactive", "lower": "batch", "equal": "interactive"}
    fields = {"checkpoint": BUNDLED_MODEL, "device": "cpu", "max_model_len": 256, "memory": "64MiB"}
    fleet = {
        "server": {"port": 0, "api_server_count": 1},
        "models": {name: fields | {"priority": each} for name, each in classes.items()},
        "sharing": {"min_share": 0.05, "max_wait_ms": 5000},
    }
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps(fleet))  # JSON is YAML
    times: dict[str, list[float]] = {"lower": [], "equal": []}
    with running([sys.executable, "-c", SERVE, "up", str(file)], tmp_path / "stderr") as server:
        server.wait_healthy(WAIT_S)
        share_one_core(server)
        complete(server, "chat", 16)
        for _ in range(ROUNDS):
            for name, found in times.items():
                with busy(server, name) as ended:
                    for _ in range(REQUESTS):
                        found.append(complete(server, "chat", 16))
                        time.sleep(0.03)
                assert ended, f"{name} starves"
    # The slowest requests are those that other programs on the core have held up.
    assert statistics.median(times["lower"]) < 0.8 * statistics.median(times["equal"])
