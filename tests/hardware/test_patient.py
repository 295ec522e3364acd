"""A driver that hangs is waited for only so long."""

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from certify_tools import certified, h200s, node_of, told
from pynvml import NVML_ERROR_NO_PERMISSION, NVML_ERROR_TIMEOUT, NVMLError

import meltcore
from meltcore.errors import MeltcoreError
from meltcore.hardware.fake import FakeGpu, FakeNvml
from meltcore.hardware.nvml import NoDriverError, Nvml
from meltcore.hardware.patient import PatientNvml, at_once, patiently


class _Hanging(FakeNvml):
    """Never says what the PCIe link of its second GPU is."""

    asked = 0

    def pcie_replays(self, board: Any) -> int:
        if board.uuid.startswith("GPU-00000001"):
            self.asked += 1
            threading.Event().wait(30)
        return 7


def test_answers_and_errors_pass_through() -> None:
    gpu = FakeGpu(refused={"vbios": NVML_ERROR_NO_PERMISSION})
    nvml = PatientNvml(FakeNvml([gpu]))
    assert nvml.boards() == [gpu]
    assert nvml.ecc_errors(gpu, uncorrected=False) == 3
    with pytest.raises(NVMLError) as error:
        nvml.vbios(gpu)
    assert error.value.value == NVML_ERROR_NO_PERMISSION


def test_a_gpu_that_hung_once_is_not_asked_again_and_the_others_are() -> None:
    gpus = h200s(2)
    inner = _Hanging(gpus)
    nvml = PatientNvml(inner, limit_s=0.1)
    began_s = time.monotonic()
    for _ in range(3):
        with pytest.raises(NVMLError) as error:
            nvml.pcie_replays(gpus[1])
        assert error.value.value == NVML_ERROR_TIMEOUT
    assert time.monotonic() - began_s < 2
    assert inner.asked == 1
    assert nvml.pcie_replays(gpus[0]) == 7


def test_a_hung_driver_ends_in_unknown_not_in_a_hung_certificate(tmp_path: Path) -> None:
    node = node_of(h200s(2))
    node.nvml = PatientNvml(_Hanging(node.fakes), limit_s=0.1)
    certificate = certified(tmp_path, node, "quick")
    assert certificate.exit_code == 3
    assert ("UNKNOWN", "STATE_UNREADABLE", "GPU 1") in told(certificate)
    assert [subject for _, _, subject in told(certificate) if "GPU 0" in subject] == []


def test_a_driver_that_never_starts_is_an_error() -> None:
    with pytest.raises(MeltcoreError, match=r"does not answer: no answer within 0\.1 s"):
        patiently(lambda: threading.Event().wait(30), 0.1)  # type: ignore[arg-type,return-value]
    with pytest.raises(NoDriverError, match="none here"):
        patiently(_no_driver)
    assert patiently(lambda: FakeNvml([FakeGpu()])).driver() == "580.00.00"


def _no_driver() -> Nvml:
    raise NoDriverError("none here")


def test_gpus_are_asked_side_by_side_and_answer_in_their_order() -> None:
    began_s = time.monotonic()

    def slow(gpu: int) -> int:
        time.sleep(0.2)
        return gpu * gpu

    assert at_once(slow, range(8)) == [gpu * gpu for gpu in range(8)]
    assert time.monotonic() - began_s < 1.0
    assert at_once(slow, []) == []


def test_no_setting_of_a_gpu_is_ever_changed() -> None:
    """NVML's setters, clears and resets, and nvidia-smi itself, occur nowhere in the package."""
    changes = re.compile(r"\bnvml(?!EventSet)\w*(Set|Clear|Reset|Modify|Remove)[A-Z]\w*|[\"']nvidia-smi")
    source = Path(meltcore.__file__).parent
    found = {path.name: changes.findall(path.read_text()) for path in source.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert changes.search("pynvml.nvmlDeviceSetPowerManagementLimit(board, 1)"), "the pattern knows a setter"
