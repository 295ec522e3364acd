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
from hypothesis import given as drawn
from hypothesis import strategies as st
from waiting import WAIT_S

import meltcore
from meltcore.common.host_memory import host_total_bytes
from meltcore.measure.documents.fingerprint import clean_arguments, take_fingerprint


def test_fingerprint_names_machine_and_versions() -> None:
    found = take_fingerprint(["demo"], seed=3)
    assert found.cores == len(os.sched_getaffinity(0))
    assert found.memory_bytes > 2**28
    assert found.versions["meltcore"] == meltcore.__version__
    assert found.versions["numpy"]
    assert (found.arguments, found.seed) == (["demo"], 3)


def test_fingerprint_tells_no_host_name_and_no_folder() -> None:
    text = msgspec.json.encode(take_fingerprint(["--out", str(Path.home() / "runs")])).decode()
    assert str(Path.home() / "runs") not in text
    assert str(Path(meltcore.__file__).parent) not in text
    assert f'"{socket.gethostname()}"' not in text


def test_secrets_and_folders_leave_the_arguments() -> None:
    given = ["load", "http://me:pw@host:1", "--api-key", "abc", "--out=/home/me/x", "--hf-token=t", "--seed", "1"]
    assert clean_arguments(given) == [
        *("load", "http://***@host:1", "--api-key", "***", "--out=.../x", "--hf-token=***", "--seed", "1")
    ]


def test_secret_that_looks_like_an_option_is_hidden_too() -> None:
    assert clean_arguments(["--api-key", "--key", "x"]) == ["--api-key", "***", "x"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("meltcore serve m --api-key SECRET --port {port}", "meltcore serve m --api-key *** --port {port}"),
        ("vllm serve  'my model' --hf-token 'SEC RET'", "vllm serve  'my model' --hf-token ***"),
        ("vllm --api-key=SECRET --x", "vllm --api-key=*** --x"),
        ("HF_TOKEN=SECRET vllm serve m --port 1", "HF_TOKEN=*** vllm serve m --port 1"),
        ("env hf_Token='SEC RET' OpenAI_API_KEY=SECRET vllm", "env hf_Token=*** OpenAI_API_KEY=*** vllm"),
        ("bash -c 'HF_TOKEN=SECRET vllm --b'  -x", "bash -c 'HF_TOKEN=*** vllm --b'  -x"),
        ("/usr/bin/env HF_TOKEN=SECRET serve.sh", ".../env HF_TOKEN=*** serve.sh"),
        ("/opt/me/vllm serve /home/me/m --port 1", ".../vllm serve .../m --port 1"),
        ("vllm --server http://me:SECRET@host --x", "vllm --server http://***@host --x"),
        ("don't --api-key SECRET", "don't --api-key ***"),
    ],
)
def test_command_line_in_one_argument_is_cleaned_word_by_word(given: str, shown: str) -> None:
    assert clean_arguments(["--command", given, "--seed", "1"]) == ["--command", shown, "--seed", "1"]
    assert clean_arguments([f"--command={given}"]) == [f"--command={shown}"]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (["env", "HF_TOKEN=SECRET", "vllm"], ["env", "HF_TOKEN=***", "vllm"]),
        (["env", "MY_PASSWORD=SEC RET", "x"], ["env", "MY_PASSWORD=***", "x"]),
        (["--api-key=SEC RET --b", "-token", "SECRET"], ["--api-key=***", "-token", "***"]),
        (["--API-KEY", "SECRET", "--model.hf_token", "SECRET"], ["--API-KEY", "***", "--model.hf_token", "***"]),
        (["--env=aws_secret_access_key=SECRET"], ["--env=aws_secret_access_key=***"]),
        (["/home/me/my models/m"], [".../m"]),
    ],
)
def test_every_way_to_give_a_secret_is_known(given: list[str], shown: list[str]) -> None:
    assert clean_arguments(given) == shown


def test_arguments_without_secrets_stay_as_they_are() -> None:
    given = [
        *("load", "random:in=128-1024,out=128", "--slo", "ttft:2000,tpot:99.5"),
        *("--max-tokens=5", "--tokenizer", "x", ""),
        'vllm  serve \'a b\' --override \'{"method": "mtp", "at": [1, 2]}\' --max-num-batched-tokens 8192\n',
        'env TOKENIZERS_PARALLELISM=false CUDA_VISIBLE_DEVICES=0,1 vllm --x="it\'s"',
        *('{"a": "b c", "at": "/x y"}', "What is 12 / 4? It's ~20 \\ 7 - or 'so"),
    ]
    assert clean_arguments(given) == given


@drawn(st.lists(st.text("ab =-'\"\\/~{\n")))
def test_cleaning_ends_and_keeps_one_argument_for_each(given: list[str]) -> None:
    assert len(clean_arguments(given)) == len(given)


def test_taking_a_fingerprint_does_not_import_torch() -> None:
    code = (
        "import sys; from meltcore.measure.documents.fingerprint import take_fingerprint; take_fingerprint(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, check=False).returncode == 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """NVML of three GPUs."""
    memory = SimpleNamespace(total=141 * 2**30, used=2**30)
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
def test_gpu_that_is_denied_or_lost_is_left_out(driver: pytest.MonkeyPatch, status: int) -> None:
    def handle(index: int) -> int:
        if index == 1:
            raise pynvml.NVMLError(status)
        return index

    assert [gpu.uuid for gpu in take_fingerprint().gpus] == ["GPU-0", "GPU-1", "GPU-2"]
    driver.setattr(pynvml, "nvmlDeviceGetHandleByIndex", handle)
    found = take_fingerprint()
    assert ([gpu.uuid for gpu in found.gpus], found.gpu_driver) == (["GPU-0", "GPU-2"], "580.1")


def test_gpu_that_shares_the_hosts_memory_has_that_memory(driver: pytest.MonkeyPatch) -> None:
    """It was taken for a driver that fails, and no GPU was named."""

    def unsupported(handle: int) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    driver.setattr(pynvml, "nvmlDeviceGetMemoryInfo", unsupported)
    assert take_fingerprint().gpu_driver == "NVML error: Not Supported", "of an H200 that is a fault"
    driver.setattr(pynvml, "nvmlDeviceGetName", lambda handle: "NVIDIA GB10")
    assert [gpu.memory_bytes for gpu in take_fingerprint().gpus] == [host_total_bytes()] * 3
    driver.setattr(pynvml, "nvmlDeviceGetMemoryInfo", lambda handle: SimpleNamespace(total=0, used=0))
    assert [gpu.memory_bytes for gpu in take_fingerprint().gpus] == [host_total_bytes()] * 3


def test_driver_that_fails_or_hangs_is_told_in_its_own_place(driver: pytest.MonkeyPatch) -> None:
    def fail() -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)

    driver.setattr(pynvml, "nvmlDeviceGetCount", fail)
    assert take_fingerprint().gpus == []
    assert take_fingerprint().gpu_driver == "NVML error: Unknown Error"
    driver.setattr(pynvml, "nvmlInit", fail)
    assert take_fingerprint().gpu_driver == "NVML error: Unknown Error"
    driver.setattr(pynvml, "nvmlInit", lambda: threading.Event().wait(30))
    driver.setattr("meltcore.measure.documents.fingerprint._DRIVER_TIMEOUT_S", 0.1)
    assert take_fingerprint().gpu_driver == "NVML gave no answer within 0.1 s"
