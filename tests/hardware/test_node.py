"""The seam against this machine: programs end, hang, and are killed with all they started."""

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from meltcore.hardware import nvml as nvml_module
from meltcore.hardware.fake import FakeNvml
from meltcore.hardware.node import Node
from meltcore.hardware.nvml import GpuLostError, Nvml


def node() -> Node:
    return Node(FakeNvml([]))


def test_a_program_gets_its_question_and_environment_and_its_answer_comes_back() -> None:
    code = "import os, sys; print(sys.stdin.read() + os.environ['COLOUR']); print('woe', file=sys.stderr); sys.exit(3)"
    ran = node().run([sys.executable, "-c", code], b"sky is ", {"COLOUR": "blue"}, 30.0)
    assert (ran.code, ran.stdout, ran.last_words, ran.alive) == (3, b"sky is blue\n", "woe", False)


def test_a_hung_program_is_killed_with_its_children_and_what_it_wrote_is_kept() -> None:
    code = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    began_s = time.monotonic()
    ran = node().run([sys.executable, "-c", code], b"", {}, 1.5)
    assert time.monotonic() - began_s < 10
    assert ran.code is None
    child = int(ran.stdout)
    for _ in range(50):
        if not _runs(child):
            break
        time.sleep(0.1)
    assert not _runs(child)


def _runs(pid: int) -> bool:
    """A killed child that nobody has waited for is no longer running."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def test_what_a_program_leaves_behind_is_ended_too() -> None:
    code = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(child.pid)\n"
    )
    ran = node().run([sys.executable, "-c", code], b"", {}, 30.0)
    assert ran.code == 0
    time.sleep(0.2)
    assert not _runs(int(ran.stdout))


def test_a_file_that_is_not_there_reads_as_none(tmp_path: "os.PathLike[str]") -> None:
    assert node().read(tmp_path / "nothing") is None  # type: ignore[operator]


def test_gpus_that_a_cgroup_denies_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = nvml_module.pynvml

    def handle(index: int) -> str:
        if index == 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return f"handle {index}"

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 3)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    assert Nvml().boards() == ["handle 0", "handle 2"]


def test_a_gpu_that_is_lost_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = nvml_module.pynvml

    def handle(index: int) -> str:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    monkeypatch.setattr(pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    with pytest.raises(GpuLostError, match="GPU 0 is lost: it fell off the bus"):
        Nvml().boards()


def test_nvlink_errors_are_those_that_the_generation_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pynvml = nvml_module.pynvml
    counters = {
        pynvml.NVML_NVLINK_ERROR_DL_REPLAY: 1,
        pynvml.NVML_NVLINK_ERROR_DL_RECOVERY: 2,
        pynvml.NVML_NVLINK_ERROR_DL_CRC_FLIT: 4,
    }
    fields = {
        pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS: 8,
        pynvml.NVML_FI_DEV_NVLINK_COUNT_EFFECTIVE_ERRORS: 16,
    }

    def counter(board: object, link: int, kind: int) -> int:
        return counters[kind] + link

    def refusal(status: int) -> Callable[..., int]:
        def refuse(board: object, link: int, kind: int) -> int:
            raise pynvml.NVMLError(status)

        return refuse

    def values(board: object, wanted: list[tuple[int, int]]) -> list[SimpleNamespace]:
        [(field, link)] = wanted
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


# Stands for `meltcore demo`: it starts a program in a session of its own, and ends it where it is itself ended.
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


def test_a_program_past_its_limit_may_end_what_it_started_elsewhere() -> None:
    ran = node().run([sys.executable, "-c", _PARENT], b"", {}, 1.5)
    assert ran.code is None
    assert not _runs(int(ran.stdout))


def test_programs_of_other_threads_can_be_ended() -> None:
    machine = node()
    with ThreadPoolExecutor() as pool:
        running = [pool.submit(machine.run, [sys.executable, "-c", _PARENT], b"", {}, 50.0) for _ in range(2)]
        time.sleep(1.5)
        machine.end_programs()
        ran = [each.result(timeout=10) for each in running]
    assert [each.code for each in ran] == [0, 0]
    assert not any(_runs(int(each.stdout)) for each in ran)
