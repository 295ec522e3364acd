"""Calls to a hanging driver have a time limit."""

import re
import threading
from pathlib import Path
from typing import Any

import pytest
from certify_tools import certified, findings_in, h200s, node_of
from fake_gpu import FakeGpu, FakeNvml
from pynvml import NVML_ERROR_NO_PERMISSION, NVML_ERROR_TIMEOUT, NVMLError
from waiting import WAIT_S

import meltcore
from meltcore.common.errors import MeltcoreError
from meltcore.common.gpus.driver import NoDriverError, Nvml, NvmlWithTimeout, connect, map_concurrently


class HangingNvml(FakeNvml):
    """Hangs when it reads the PCIe replays of its second GPU."""

    calls = 0

    def pcie_replays(self, device: Any) -> int:
        if device.uuid.startswith("GPU-00000001"):
            self.calls += 1
            threading.Event().wait(30)
        return 7


def test_values_and_errors_pass_through() -> None:
    gpu = FakeGpu(refused={"vbios": NVML_ERROR_NO_PERMISSION})
    nvml = NvmlWithTimeout(FakeNvml([gpu]))
    assert nvml.gpus() == [gpu]
    assert nvml.ecc_errors(gpu, is_uncorrected=False) == 3
    with pytest.raises(NVMLError) as error:
        nvml.vbios(gpu)
    assert error.value.value == NVML_ERROR_NO_PERMISSION


def test_gpu_that_hung_once_is_not_read_again() -> None:
    gpus = h200s(2)
    inner = HangingNvml(gpus)
    nvml = NvmlWithTimeout(inner, limit_s=0.1)
    for _ in range(3):
        with pytest.raises(NVMLError) as error:
            nvml.pcie_replays(gpus[1])
        assert error.value.value == NVML_ERROR_TIMEOUT
    assert inner.calls == 1
    assert nvml.pcie_replays(gpus[0]) == 7


def test_slow_call_is_told_of_its_gpu_alone() -> None:
    gpus = h200s(3)
    nvml = NvmlWithTimeout(HangingNvml(gpus), limit_s=0.1, slow_s=0.05)
    with pytest.raises(NVMLError):
        nvml.pcie_replays(gpus[1])
    assert nvml.slow_call_s(gpus[1]) >= 0.1
    assert nvml.slow_call_s(gpus[2]) == 0
    assert Nvml.slow_call_s(FakeNvml(gpus), gpus[1]) == 0, "calls without a limit are not timed"


def test_hung_driver_gives_unknown_certificate(tmp_path: Path) -> None:
    node = node_of(h200s(2))
    node.nvml = NvmlWithTimeout(HangingNvml(node.fakes), limit_s=0.1)
    certificate = certified(tmp_path, node, "quick")
    assert certificate.exit_code == 3
    assert ("UNKNOWN", "STATE_UNREADABLE", "GPU 1") in findings_in(certificate)
    assert [subject for _, _, subject in findings_in(certificate) if "GPU 0" in subject] == []


def test_driver_that_never_starts_is_an_error() -> None:
    with pytest.raises(MeltcoreError, match=r"does not answer: no answer within 0\.1 s"):
        connect(lambda: threading.Event().wait(30), 0.1)  # type: ignore[arg-type,return-value]
    with pytest.raises(NoDriverError, match="none here"):
        connect(_no_driver)
    assert connect(lambda: FakeNvml([FakeGpu()])).driver() == "580.00.00"


def _no_driver() -> Nvml:
    raise NoDriverError("none here")


def test_map_concurrently_keeps_order() -> None:
    """Each call returns only once all are in progress."""
    together = threading.Barrier(8)

    def slow(gpu: int) -> int:
        together.wait(WAIT_S)
        return gpu * gpu

    assert map_concurrently(slow, range(8)) == [gpu * gpu for gpu in range(8)]
    assert map_concurrently(slow, []) == []


def test_no_setting_of_a_gpu_is_ever_changed() -> None:
    """NVML's setters, clears and resets, and nvidia-smi itself, occur nowhere in the package."""
    changes = re.compile(r"\bnvml(?!EventSet)\w*(Set|Clear|Reset|Modify|Remove)[A-Z]\w*|[\"']nvidia-smi")
    source = Path(meltcore.__file__).parent
    found = {path.name: changes.findall(path.read_text()) for path in source.rglob("*.py")}
    assert {name: calls for name, calls in found.items() if calls} == {}
    assert changes.search("pynvml.nvmlDeviceSetPowerManagementLimit(device, 1)"), "the pattern knows a setter"
