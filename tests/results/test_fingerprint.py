import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pynvml
import pytest

import meltcore
from meltcore.results.fingerprint import clean_arguments, take_fingerprint


def test_the_fingerprint_names_machine_and_versions() -> None:
    found = take_fingerprint(["demo"], seed=3)
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28
    assert found.versions["meltcore"] == meltcore.__version__
    assert found.versions["numpy"]
    assert (found.arguments, found.seed) == (["demo"], 3)


def test_the_fingerprint_tells_no_host_name_and_no_folder() -> None:
    text = msgspec.json.encode(take_fingerprint(["--out", str(Path.home() / "runs")])).decode()
    assert str(Path.home() / "runs") not in text
    assert str(Path(meltcore.__file__).parent) not in text
    assert f'"{socket.gethostname()}"' not in text


def test_secrets_and_folders_leave_the_arguments() -> None:
    given = ["load", "http://me:pw@host:1", "--api-key", "abc", "--out=/home/me/x", "--hf-token=t", "--seed", "1"]
    assert clean_arguments(given) == [
        *("load", "http://***@host:1", "--api-key", "***", "--out=.../x", "--hf-token=***", "--seed", "1")
    ]


def test_a_secret_that_looks_like_an_option_is_hidden_too() -> None:
    assert clean_arguments(["--api-key", "--key", "x"]) == ["--api-key", "***", "x"]


def test_taking_a_fingerprint_does_not_import_torch() -> None:
    code = (
        "import sys; from meltcore.results.fingerprint import take_fingerprint; take_fingerprint(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """NVML of three GPUs."""
    memory = SimpleNamespace(total=141 * 2**30)
    for name, answer in {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlSystemGetDriverVersion": lambda: "580.1",
        "nvmlDeviceGetCount": lambda: 3,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda handle: "NVIDIA H200",
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetMemoryInfo": lambda handle: memory,
    }.items():
        monkeypatch.setattr(pynvml, name, answer)
    return monkeypatch


@pytest.mark.parametrize("status", [pynvml.NVML_ERROR_NO_PERMISSION, pynvml.NVML_ERROR_GPU_IS_LOST])
def test_a_gpu_that_is_denied_or_lost_is_left_out(driver: pytest.MonkeyPatch, status: int) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError(status)
        return index

    assert [gpu.uuid for gpu in take_fingerprint().gpus] == ["GPU-0", "GPU-1", "GPU-2"]
    driver.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    found = take_fingerprint()
    assert ([gpu.uuid for gpu in found.gpus], found.gpu_driver) == (["GPU-0", "GPU-2"], "580.1")


def test_a_driver_that_fails_or_hangs_is_told_in_its_own_place(driver: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    driver.setattr(pynvml, "nvmlDeviceGetCount", fail)
    assert take_fingerprint().gpus == []
    assert take_fingerprint().gpu_driver == "NVML said: Unknown Error"
    driver.setattr(pynvml, "nvmlInit", lambda: threading.Event().wait(30))
    driver.setattr("meltcore.results.fingerprint._DRIVER_TIMEOUT_S", 0.1)
    assert take_fingerprint().gpu_driver == "NVML gave no answer within 0.1 s"
