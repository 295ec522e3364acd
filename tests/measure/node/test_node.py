"""Node on this machine: programs end, hang, and are killed with their children."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_gpu import FakeNvml
from waiting import WAIT_S, wait_until

from meltcore.common.gpus import driver
from meltcore.common.gpus.driver import GpuLostError, Nvml
from meltcore.measure.node.node import Node, last_line


def node() -> Node:
    return Node(FakeNvml([]))


def test_program_gets_stdin_and_environment_and_output_returns() -> None:
    code = "import os, sys; print(sys.stdin.read() + os.environ['COLOR']); print('woe', file=sys.stderr); sys.exit(3)"
    ran = node().run([sys.executable, "-c", code], b"sky is ", {"COLOR": "blue"}, 30.0)
    assert (ran.returncode, ran.stdout, last_line(ran), ran.is_alive) == (3, b"sky is blue\n", "woe", False)


@pytest.mark.slow
def test_hung_program_is_killed_with_children_and_output_is_kept() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    ran = node().run([sys.executable, "-c", code], b"", {}, 1.5)
    assert ran.returncode is None
    child = int(ran.stdout)
    wait_until(lambda: not _runs(child), "the end of the child")
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """Returns False also for a killed child without a wait."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:  # also where it ends between open and read
        return False


def test_processes_left_behind_are_ended() -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
    )
    ran = node().run([sys.executable, "-c", code], b"", {}, 30.0)
    assert ran.returncode == 0
    time.sleep(0.2)
    assert not _runs(int(ran.stdout))


def test_missing_file_reads_as_none(tmp_path: "os.PathLike[str]") -> None:
    assert node().read(tmp_path / "nothing") is None  # type: ignore[operator]


def test_gpus_denied_by_cgroup_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = driver.pynvml

    def handle(index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return f"handle {index}"

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert Nvml().gpus() == ["handle 0", "handle 2"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (driver.pynvml.NVML_ERROR_GPU_IS_LOST, "is lost: it fell off the bus"),
        (driver.pynvml.NVML_ERROR_RESET_REQUIRED, "needs a reset"),
    ],
)
def test_gpu_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch, code: int, reason: str) -> None:
    pynvml = driver.pynvml

    def handle(index: int) -> str:
        raise pynvml.NVMLError(code)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    with pytest.raises(GpuLostError, match=f"GPU 0 {reason}"):
        Nvml().gpus()


def test_nvlink_errors_use_counters_of_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = driver.pynvml
    counters = {
        pynvml.NVML_NVLINK_ERROR_DL_REPLAY: 1,
        pynvml.NVML_NVLINK_ERROR_DL_RECOVERY: 2,
        pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT: 4,
    }
    fields = {
        pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS: 8,
        pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS: 16,
    }

    def counter(device: object, link: int, kind: int) -> int:
        return counters[kind] + link

    def refusal(status: int) -> Callable[..., int]:
        def refuse(device: object, link: int, kind: int) -> int:
            raise pynvml.NVMLError(status)

        return refuse

    def values(device: object, requested: list[tuple[int, int]]) -> list[SimpleNamespace]:
        [(field, link)] = requested
        value = SimpleNamespace(ullVal=fields[field] + link)
        kind = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        return [SimpleNamespace(valueType=kind, nvmlReturn=pynvml.NVML_SUCCESS, value=value)]

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetFieldValues", values)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkErrorCounter", counter)
    assert Nvml().nvlink_errors(None, 100) == 7 + 300
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkErrorCounter", refusal(pynvml.NVML_ERROR_NOT_SUPPORTED))
    assert Nvml().nvlink_errors(None, 100) == 24 + 200
    monkeypatch.setattr(pynvml, "nvmlDeviceGetNvLinkErrorCounter", refusal(pynvml.NVML_ERROR_NO_PERMISSION))
    with pytest.raises(pynvml.NVMLError):
        Nvml().nvlink_errors(None, 100)


# Stands for `meltcore demo`: it starts a program in another session, and ends it when it is itself terminated.
_PARENT = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(child.pid, flush=True)
def leave(number, frame):
    child.kill()
    child.wait()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
time.sleep(60)
"""


@pytest.mark.slow
def test_program_past_its_limit_can_end_other_sessions() -> None:
    ran = node().run([sys.executable, "-c", _PARENT], b"", {}, 1.5)
    assert ran.returncode is None
    assert not _runs(int(ran.stdout))


@pytest.mark.slow
def test_programs_of_other_threads_can_be_ended() -> None:
    machine = node()
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(machine.run, [sys.executable, "-c", _PARENT], b"", {}, 50.0) for _ in range(2)]
        time.sleep(1.5)
        machine.terminate_programs()
        ran = [each.result(timeout=WAIT_S) for each in running]
    assert [each.returncode for each in ran] == [0, 0]
    assert not any(_runs(int(each.stdout)) for each in ran)
