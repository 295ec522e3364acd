"""The MPS daemon of a fleet, over a scripted control program."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from waiting import WAIT_S, wait_until

from meltcore.common.errors import ConfigError
from meltcore.common.process import run, start_ticks
from meltcore.fleet.swap import mps
from meltcore.fleet.swap.mps import MpsDaemon
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
[ "$line" = get_server_list ] && echo 4711
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
    urgent = daemon.client_environment("interactive", 75)  # starts it
    try:
        assert daemon.is_running
        assert urgent == daemon.environment
        limited = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "75"}
        assert daemon.client_environment("batch", 75) == daemon.environment | limited
        assert daemon.servers() == [4711]
        pid = int((tmp_path / "mps" / "pipe" / "pid").read_text())
        os.kill(pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 5
        while daemon.is_running and time.monotonic() < deadline_s:
            time.sleep(0.01)
        daemon.client_environment("standard", 75)
        assert daemon.is_running, "one that has ended is started again"
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
        from meltcore.fleet.swap.mps import MpsDaemon
        MpsDaemon(Path({str(tmp_path / "mps")!r})).start()
        os.kill(os.getpid(), 9)"""
    assert run([sys.executable, "-c", server], limit_s=WAIT_S).returncode == -signal.SIGKILL
    pid = int((tmp_path / "mps" / "pipe" / "pid").read_text())
    wait_until(lambda: start_ticks(pid) is None, "the end of the daemon")


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
