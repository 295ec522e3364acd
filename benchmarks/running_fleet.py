"""A fleet that runs as a process of its own, seen from outside: its address, state, metrics, processes and CPU time."""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from simulated_cluster import VOCAB_SIZE

import meltcore.fleet.plan.cluster
import meltcore.fleet.ray.cluster_driver
from meltcore.cli.signals import signals_as_ctrl_c
from meltcore.common.process import end_group, start
from meltcore.fleet.admin.admin import call_admin
from meltcore.fleet.daemon import find_fleet, fleet_options, serve_recorded
from meltcore.fleet.plan.cluster import cluster_reader
from meltcore.fleet.plan.planned import FleetPlanner
from meltcore.fleet.plan.site import OneMachine
from meltcore.fleet.processes.engine_process import ENGINE_COMMAND

TEMPLATE = "{%- for m in messages -%}{{- m.content -}}{%- endfor -%}"
_START_LIMIT_S, _END_LIMIT_S = 60.0, 10.0
_LIBC = ctypes.CDLL(None, use_errno=True)


def write_checkpoint(folder: Path) -> Path:
    """Write what a fleet needs of a model whose engine computes nothing; returns the folder of the checkpoint."""
    checkpoint = folder / "model"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE}))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return checkpoint


def use_driver(module: str) -> None:
    """Let a module answer for the cluster that `--ray ADDRESS` names, in place of the driver of a Ray cluster."""
    for user in (meltcore.fleet.plan.cluster, meltcore.fleet.ray.cluster_driver):
        vars(user)["DRIVER_MODULE"] = module


def serve(path: Path, address: str | None, engine_command: Sequence[str] = ENGINE_COMMAND) -> int:
    """Be the server: `meltcore up FILE`, with `--ray ADDRESS` unless it is None."""
    planner = FleetPlanner(path, OneMachine.read if address is None else cluster_reader(address))
    options = fleet_options(planner)
    return serve_recorded(planner.config(), "", options, engine_command=engine_command)


class Fleet:
    """The running server, seen from outside."""

    def __init__(self, process: subprocess.Popen[bytes], url: str) -> None:
        self.process, self.url = process, url

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=30) as reply:
            return str(reply.read().decode())

    def health(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self.get("/health")))
        except OSError:
            return {}

    def samples(self) -> dict[str, list[tuple[str, float]]]:
        """Every sample by name: labels and value."""
        found: dict[str, list[tuple[str, float]]] = {}
        for line in self.get("/metrics").splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                name, _, labels = name.partition("{")
                found.setdefault(name.removeprefix("meltcore:"), []).append((labels, float(value)))
        return found

    def rows(self) -> list[dict[str, Any]]:
        port = int(self.url.rpartition(":")[2])
        return list(call_admin(find_fleet(port).admin, "GET", "/ps"))

    def processes(self) -> dict[int, list[str]]:
        """The command line of the server and of each of its descendants, by process id."""
        found = {}
        waiting = [self.process.pid]
        while waiting:
            pid = waiting.pop()
            with suppress(OSError):  # it may have ended
                found[pid] = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                for thread in Path(f"/proc/{pid}/task").iterdir():  # each has those that it has started
                    waiting += map(int, (thread / "children").read_text().split())
        return found

    def children(self, word: str) -> list[int]:
        """Processes with an argument of their command line."""
        return [pid for pid, command in self.processes().items() if word in command]

    def api_cpu_s(self) -> float:
        return sum(map(cpu_s, self.children("meltcore.serve.api_server_main")))


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> Iterator[Fleet]:
    """Start a server by a command that calls `serve`; its output is `log`. Raises SystemExit without its address."""
    with log.open("wb") as output:
        process = start(command, stdout=output, stderr=output, environment=os.environ | dict(environment))
    try:
        with signals_as_ctrl_c():
            wait(lambda: "listening on" in log.read_text() or process.poll() is not None, "the address", _START_LIMIT_S)
            if process.poll() is not None:
                raise SystemExit(log.read_text())
            (url,) = re.findall(r"listening on (\S+)", log.read_text())
            yield Fleet(process, url)
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_LIMIT_S)
        end_group(process, _END_LIMIT_S)


def with_scripts() -> None:
    """Let child processes import the modules beside this one."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def script_command(*arguments: str) -> list[str]:
    """Return the command that starts the running script with other arguments."""
    return [sys.executable, str(Path(sys.argv[0]).absolute()), *arguments]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process with all its threads: those of /proc/PID/stat, to the nanosecond."""
    clock = ctypes.c_int()
    if error := _LIBC.clock_getcpuclockid(pid, ctypes.byref(clock)):
        raise OSError(error, f"no CPU clock of process {pid}")
    return time.clock_gettime(clock.value)


def wait(condition: Callable[[], Any], what: str, limit_s: float, every_s: float = 0.25) -> float:
    """Wait until it holds; returns how long that took. Raises SystemExit."""
    started_s = time.monotonic()
    while not condition():
        if time.monotonic() - started_s > limit_s:
            raise SystemExit(f"waited {limit_s:g} s in vain for {what}")
        time.sleep(every_s)
    return time.monotonic() - started_s


def end_with_parent() -> None:
    """End this process at the end of its input, as an engine of this machine does; for a thread."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)
