"""The MPS daemon of a fleet, over a scripted control program."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from waiting import WAIT_S, until, wait_until

from meltcore.common.errors import ConfigError
from meltcore.common.process import run, start_ticks
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.processes import mps
from meltcore.fleet.processes.engine_process import LocalEngineProcess
from meltcore.fleet.processes.mps import MpsDaemon
from meltcore.fleet.run import engines
from meltcore.fleet.run.engines import LaunchSettings, LocalLauncher
from meltcore.settings.config import EngineConfig, SharingSection
from meltcore.settings.fleet_file import parse_fleet

# `-f` is the daemon; without it a command comes by the standard input.
CONTROL = """#!/bin/sh
echo "$@ $CUDA_VISIBLE_DEVICES" >> "$CUDA_MPS_LOG_DIRECTORY/calls"
if [ "$1" = -f ]; then
  echo "a line of its log" > "$CUDA_MPS_LOG_DIRECTORY/control.log"
  [ -n "$FAILS" ] && exit 3
  touch "$CUDA_MPS_PIPE_DIRECTORY/control"
  echo $$ > "$CUDA_MPS_PIPE_DIRECTORY/pid"
  exec sleep 300
fi
read line
echo "$line" >> "$CUDA_MPS_LOG_DIRECTORY/commands"
[ -e "$CUDA_MPS_LOG_DIRECTORY/hangs" ] && exec sleep 60
[ -e "$CUDA_MPS_LOG_DIRECTORY/refuses" ] && echo "Cannot find MPS control daemon process" && exit 1
[ "$line" = get_server_list ] && echo 4711
[ "$line" = "get_client_list 4711" ] && cat "$CUDA_MPS_LOG_DIRECTORY/clients"
[ "${line%% *}" = quit ] && kill $(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")
exit 0
"""


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(CONTROL)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def test_daemon_serves_clients_until_it_is_stopped(
    control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    daemon = MpsDaemon(tmp_path / "mps")
    assert not daemon.is_running
    daemon.start()
    try:
        assert daemon.is_running
        assert daemon.client_environment("interactive", 75) == daemon.environment
        limited = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "75"}
        assert daemon.client_environment("batch", 75) == daemon.environment | limited
        assert daemon.servers() == [4711]
        pid = int((tmp_path / "mps" / "pipe" / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 5
        while daemon.is_running and time.monotonic() < deadline_s:
            time.sleep(0.01)
        daemon.start()
        assert daemon.is_running, "one that has ended is started again"
        running = (tmp_path / "mps" / "pipe" / "pid").read_text()
        daemon.start()
        assert (tmp_path / "mps" / "pipe" / "pid").read_text() == running, "one that runs is left alone"
    finally:
        daemon.stop()
    assert not daemon.is_running
    log = tmp_path / "mps" / "log"
    assert (log / "commands").read_text().split("\n")[-2] == "quit -t 5"
    assert "-f \n" in (log / "calls").read_text(), "the daemon sees all GPUs, as its clients number them"


def test_daemon_ends_with_a_server_that_is_killed(control: Path, tmp_path: Path) -> None:
    """It stayed after `kill -9` of the supervisor, though no other process did."""
    server = f"""if True:
        import os
        from pathlib import Path
        from meltcore.fleet.processes.mps import MpsDaemon
        MpsDaemon(Path({str(tmp_path / "mps")!r})).start()
        os.kill(os.getpid(), 9)"""
    assert run([sys.executable, "-c", server], limit_s=WAIT_S).returncode == -signal.SIGKILL
    pid = int((tmp_path / "mps" / "pipe" / "pid").read_text())
    wait_until(lambda: start_ticks(pid) is None, "the end of the daemon")


def test_engine_that_is_no_client_is_named(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of an engine has to be in MPS's list, since one that misses its socket is time-sliced silently."""
    daemon, log, group = MpsDaemon(tmp_path / "mps"), tmp_path / "mps" / "log", os.getpgid(0)
    log.mkdir(parents=True)
    (log / "clients").write_text(f"{os.getpid()}\n1\n")
    assert daemon.client_problem(group, 1) == ""
    engine = engine_process(daemon, tensor_parallel_size=1)
    monkeypatch.setattr(LocalEngineProcess, "pid", group)
    assert asyncio.run(engine.sharing_problem()) == ""
    problem = daemon.client_problem(group, 2)
    assert problem.startswith("its kernels take turns with those of other engines: of its 2 processes ")
    assert f"(group {group}), MPS lists 1 as clients (all clients: 1, {os.getpid()}); see {log}" in problem
    (log / "clients").write_text("")
    problem = asyncio.run(engine.sharing_problem())
    assert f"of its 1 processes (group {group}), MPS lists 0 as clients (all clients: none)" in problem
    (log / "refuses").touch()
    unknown = "it is not known whether its kernels run concurrently with others: nvidia-cuda-mps-control "
    refused = "answered get_server_list with exit status 1: Cannot find MPS control daemon process"
    assert daemon.client_problem(group, 1) == unknown + refused
    (log / "hangs").touch()
    monkeypatch.setattr(mps, "_ANSWER_LIMIT_S", 0.1)
    assert daemon.client_problem(group, 1) == unknown + "did not answer get_server_list within 0.1 s"


def engine_process(daemon: object, *, tensor_parallel_size: int) -> LocalEngineProcess:
    config = EngineConfig(model="m", tensor_parallel_size=tensor_parallel_size)
    return LocalEngineProcess(config, (), print, directory=Path(), client_count=1, mps=daemon)  # type: ignore[arg-type]


def test_event_loop_goes_on_while_the_daemon_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited for the daemon for up to 10 s, and the supervisor answered no command meanwhile."""

    class SlowDaemon:
        def __init__(self, _folder: Path) -> None:
            self.begun, self.may_end = threading.Event(), threading.Event()

        def start(self) -> None:
            self.begun.set()
            assert self.may_end.wait(20), "the event loop was blocked"

        stop = start

    async def released(call: Coroutine[Any, Any, None], daemon: SlowDaemon) -> None:
        waiting = asyncio.create_task(call)
        await until(lambda: daemon.begun.is_set() or waiting.done(), "the start of the daemon")
        daemon.may_end.set()
        await waiting
        daemon.begun.clear()
        daemon.may_end.clear()

    async def live() -> None:
        daemon = SlowDaemon(Path())
        await released(engine_process(daemon, tensor_parallel_size=1).prepare(), daemon)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
        monkeypatch.setattr(engines, "MpsDaemon", lambda _folder: daemon)
        settings = Mock(spec=LaunchSettings, sharing=SharingSection(means="mps"), sockets=Path())
        settings.fleet = lambda: PlacedFleet(parse_fleet("models: {a: {checkpoint: a, device: cpu}}"))
        launcher = LocalLauncher(settings, print)
        await released(launcher.connect(), daemon)
        await released(launcher.stop(), daemon)

    asyncio.run(live())


@pytest.mark.slow
def test_daemon_that_does_not_start_is_an_error(control: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    with pytest.raises(ConfigError, match="nvidia-cuda-mps-control ended with code 3: a line of its log"):
        MpsDaemon(tmp_path / "mps").start()
    control.write_text("#!/bin/sh\nsleep 60\n")
    monkeypatch.setattr(mps, "_START_LIMIT_S", 0.2)
    monkeypatch.setattr(mps, "_END_LIMIT_S", 0.5)
    with pytest.raises(ConfigError, match=r"was not ready within 0\.2 s: a line of its log"):
        MpsDaemon(tmp_path / "mps").start()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(mps, "_FOLDERS", ())
    with pytest.raises(ConfigError, match="mps needs nvidia-cuda-mps-control"):
        MpsDaemon(tmp_path / "mps")


def test_fleet_file_chooses_it() -> None:
    text = "models: {a: {checkpoint: meltcore/sums}}\n"
    config = parse_fleet(text + "sharing: {means: mps, mps_sm_percent: 60}")
    assert config.sharing.sm_percent == 60
    config = parse_fleet(text)
    assert config.sharing.sm_percent is None, "pacing alone"
    with pytest.raises(ConfigError, match="mps_sm_percent"):
        parse_fleet(text + "sharing: {means: mps, mps_sm_percent: 0}")
