"""The seam against this machine: programs end, hang, and are killed with all they started."""

import os
import sys
import time

import pytest

from meltcore.hardware import nvml as nvml_module
from meltcore.hardware.fake import FakeNvml
from meltcore.hardware.node import Node
from meltcore.hardware.nvml import Nvml


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
