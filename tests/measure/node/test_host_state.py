"""What no GPU reports, and what GPUs report of fabric and firmware, each broken alone on a scripted node."""

import math
from pathlib import Path
from typing import Any

import pynvml
import pytest
from certify_tools import certified, findings_in, h200s, node_of
from fake_gpu import FakeNvml, ReadingChange
from fake_node import FakeNode

from meltcore.common.process import CompletedRun, ProcessError
from meltcore.measure.documents.node import Certificate, Finding
from meltcore.measure.node.certify.checks.state import _RULES, StateCheck
from meltcore.measure.node.certify.checks.system import SystemCheck
from meltcore.measure.node.certify.context import CertifyContext
from meltcore.measure.node.node import Node
from meltcore.measure.node.snapshot import take_snapshot

XID = "4,2,9,-;NVRM: Xid (PCI:0000:01:00): 79, pid=1234, GPU has fallen off the bus.\n"
CORRECTED = "3,3,9,-;nvidia 0000:1b:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer\n"
FATAL = "3,4,9,-;pcieport 0000:00:01.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer\n"
IB = "/sys/class/infiniband/mlx5_0/ports/1"
STUCK = {"/proc/88/stat": "88 (cat) D 1 88"}
ENDED = {"/proc/99/stat": "99 (python) Z 1 99"}


def verdict_of(certificate: Certificate, name: str) -> str:
    return next(check.verdict for check in certificate.checks if check.name == name)


@pytest.mark.parametrize(
    ("node", "gpu", "finding"),
    [
        ({"files": STUCK}, {}, ("WARN", "STUCK_PROCESS", "node")),
        ({"files": ENDED}, {"processes": [99]}, ("FAIL", "ZOMBIE_PROCESS", "GPU 1")),
        ({}, {"processes": [98]}, ("FAIL", "ZOMBIE_PROCESS", "GPU 1")),
        ({"clock_error": math.inf}, {}, ("WARN", "CLOCK_UNSYNCHRONIZED", "node")),
        ({"clock_error": 2.5}, {}, ("WARN", "CLOCK_UNSYNCHRONIZED", "node")),
        ({"files": {"/sys/class/nvme/nvme0/state": "dead"}}, {}, ("FAIL", "STORAGE_NOT_LIVE", "node")),
        (
            {"files": {f"{IB}/state": "1: DOWN", f"{IB}/phys_state": "2: Polling"}},
            {},
            ("WARN", "NETWORK_LINK_DOWN", "node"),
        ),
        ({"files": {"/sys/class/nvme/nvme0/state": ""}}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"files": {f"{IB}/phys_state": ""}}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"denied": ("/sys/class/nvme",)}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"denied": ("/sys/class/infiniband",)}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"denied": ("/dev/nvidia-caps-imex-channels",)}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"denied": ("/proc",)}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"on_host": False}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"clock_error": None}, {}, ("UNKNOWN", "STATE_UNREADABLE", "node")),
        ({"log": XID}, {}, ("WARN", "KERNEL_LOG_XID", "GPU 1")),
        ({"log": CORRECTED}, {}, ("WARN", "KERNEL_LOG_PCIE", "node")),
        ({"log": CORRECTED + FATAL}, {}, ("FAIL", "KERNEL_LOG_PCIE", "node")),
        ({}, {"refused": {"processes": 4}}, ("UNKNOWN", "STATE_UNREADABLE", "GPU 1")),
        ({}, {"readings": {"fabric_state": 2}}, ("FAIL", "FABRIC_NOT_REGISTERED", "GPU 1")),
        ({}, {"readings": {"fabric_status": 999}}, ("FAIL", "FABRIC_NOT_REGISTERED", "GPU 1")),
        ({}, {"readings": {"fabric_health": 0x1}}, ("FAIL", "FABRIC_UNHEALTHY", "GPU 1")),
        ({}, {"readings": {"fabric_health": 0x500}}, ("FAIL", "FABRIC_UNHEALTHY", "GPU 1")),
        ({}, {"refused": {"fabric_state": 4}}, ("UNKNOWN", "STATE_UNREADABLE", "GPU 1")),
        ({}, {"vbios": "96.00.99.00.01"}, ("WARN", "FIRMWARE_DIFFERS", "GPU 1")),
        ({}, {"inforom": "G525.0200.00.01"}, ("WARN", "FIRMWARE_DIFFERS", "GPU 1")),
    ],
)
def test_each_fault_alone_is_found(
    node: dict[str, Any], gpu: dict[str, Any], finding: tuple[str, str, str], tmp_path: Path
) -> None:
    gpus = h200s(3)
    for name, value in gpu.items():
        setattr(gpus[1], name, value)
    others = {"BUSY"} if gpu.get("processes") else set()
    found = [
        (each.verdict, each.code, each.subject)
        for each in states(tmp_path, node_of(gpus, **node))
        if each.code not in others
    ]
    assert set(found) == {finding}


def test_each_fact_of_a_gpu_that_may_not_be_read_is_unknown(tmp_path: Path) -> None:
    keys = {*_RULES, "vbios", "inforom", "nvlinks", "fabric_state", "fabric_status", "fabric_health"}
    for key in keys - {"slow_call_s"}:  # measured here, and not read
        gpus = h200s(2)
        gpus[1].refused = {key: pynvml.NVML_ERROR_NO_PERMISSION}
        found = states(tmp_path, node_of(gpus))
        assert {(each.verdict, each.code, each.subject) for each in found} == {
            ("UNKNOWN", "STATE_UNREADABLE", "GPU 1")
        }, key


def test_processes_of_the_host_that_a_container_cannot_see_are_unknown(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].processes = [98]
    found = {(each.code, each.subject): each.verdict for each in states(tmp_path, node_of(gpus, on_host=False))}
    assert found["STATE_UNREADABLE", "GPU 1"] == found["STATE_UNREADABLE", "node"] == "UNKNOWN"


def states(folder: Path, node: FakeNode) -> list[Finding]:
    """The findings of the checks without a probe."""
    gpus = node.gpus()
    snapshot = take_snapshot(node, gpus)
    context = CertifyContext(
        node=node,
        gpus=gpus,
        snapshot=snapshot,
        tier="quick",
        telemetry=node.telemetry(folder, gpus, 0.1),
        folder=folder,
    )
    return [finding for check in (StateCheck(), SystemCheck()) for finding in check.run(context).findings]


def test_width_that_a_link_loses_under_load_is_found(tmp_path: Path) -> None:
    gpus = h200s(2)
    gpus[1].changes = [ReadingChange(5.0, "pcie_width", 8)]
    certificate = certified(tmp_path, node_of(gpus), "quick")
    assert findings_in(certificate) == [("FAIL", "PCIE_WIDTH", "GPU 1")]
    assert "fell to 8 lanes of 16 during copies" in certificate.findings[0].message


def test_what_may_not_be_read_is_unknown_and_decides_from_full_on(tmp_path: Path) -> None:
    """In a container without the kernel's log. What was read there still fails."""
    refused: dict[str, Any] = {"on_host": False, "log": None, "clock_error": None}
    for tier, verdict in (("quick", "PASS"), ("full", "UNKNOWN")):
        certificate = certified(tmp_path, node_of(h200s(2), **refused), tier)
        assert (certificate.verdict, verdict_of(certificate, "system")) == (verdict, "UNKNOWN")
        unverified = "".join(line for line in certificate.unverified if line.startswith("State of the host"))
        for key in ("stuck_processes", "clock", "xids", "pcie_errors"):
            assert f"system/{key}" in unverified
    dead = {"/sys/class/nvme/nvme0/state": "dead"}
    assert certified(tmp_path, node_of(h200s(2), files=dead, **refused), "quick").verdict == "FAIL"
    hidden = node_of(h200s(2), files={"/proc/1/stat": ""})
    assert verdict_of(certified(tmp_path, hidden, "quick"), "system") == "UNKNOWN", "as with hidepid"


@pytest.mark.parametrize(
    ("answer", "verdict", "note"),
    [
        (CompletedRun(0, b"READY\n", b""), "PASS", "IMEX is READY"),
        (CompletedRun(0, b"IDLE\n", b""), "RECORDED", "IMEX is IDLE"),
        (CompletedRun(1, b"", b"denied"), "UNKNOWN", "unreadable: IMEX: nvidia-imex-ctl -q gave status 1"),
    ],
)
def test_idle_imex_is_no_fault(answer: CompletedRun, verdict: str, note: str, tmp_path: Path) -> None:
    channels = {"/dev/nvidia-caps-imex-channels/channel0": ""}
    node = node_of(h200s(2), files=channels, program=lambda _command, _environment: answer)
    certificate = certified(tmp_path, node, "quick")
    row = next(row for check in certificate.checks for row in check.rows if row.key == "system/imex")
    assert (row.verdict, row.note, certificate.verdict) == (verdict, note, "PASS")


def test_missing_program_of_imex_is_unknown(tmp_path: Path) -> None:
    def missing(_command: object, _environment: object) -> CompletedRun:
        raise ProcessError("nvidia-imex-ctl cannot be started: No such file or directory")

    channels = {"/dev/nvidia-caps-imex-channels/channel0": ""}
    (found,) = states(tmp_path, node_of(h200s(1), files=channels, program=missing))
    assert (found.verdict, found.code) == ("UNKNOWN", "STATE_UNREADABLE")
    assert "nvidia-imex-ctl cannot be started" in found.message


def test_gpu_without_fabric_or_peers_needs_none(tmp_path: Path) -> None:
    for gpus, readings in ((2, {"fabric_state": 0}), (1, {"fabric_state": 1})):
        node = node_of(h200s(gpus, readings=readings, links_down=list(range(18)) if gpus == 1 else []))
        certificate = certified(tmp_path, node, "quick")
        rows = [row for row in certificate.checks[0].rows if row.key == "state/fabric_state"]
        assert {row.verdict for row in rows} == {"NOT_APPLICABLE"}
        assert certificate.verdict == "PASS"


@pytest.mark.parametrize(
    ("log", "span"),
    [("4,917,3,-;eth0: up", "since record 917; earlier ones are overwritten"), ("6,0,0,-;Linux", "since the start")],
)
def test_log_that_was_overwritten_says_where_it_begins(tmp_path: Path, log: str, span: str) -> None:
    certificate = certified(tmp_path, node_of(h200s(1), log=log), "quick")
    rows = [row for check in certificate.checks for row in check.rows if row.key.endswith(("/xids", "/pcie_errors"))]
    assert [(row.verdict, row.note) for row in rows] == [("PASS", f"the kernel log {span} has none")] * 2


def test_this_machine_is_read_without_rights(tmp_path: Path) -> None:
    node = Node(FakeNvml([]))
    assert (node.clock_error_s() or 0) >= 0
    assert isinstance(node.kernel_log(), str | None)
    assert node.sees_host_processes() in (True, False)
    (tmp_path / "one").touch()
    assert (node.names(tmp_path), node.names(tmp_path / "none")) == (["one"], [])
    assert node.names(tmp_path / "one") is None, "as a folder that this user may not read"


def test_fabric_and_inforom_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    from meltcore.common.gpus.driver import Nvml

    def fabric(_device: object, info: Any) -> None:
        info._obj.state, info._obj.status, info._obj.healthMask = 3, 0, 0x2A

    def unsupported(*_: object) -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    nvml = object.__new__(Nvml)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetGpuFabricInfoV", fabric)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetInforomImageVersion", lambda device: b"G525.0200")
    assert (nvml.fabric(None), nvml.inforom(None)) == ((3, 0, 0x2A), "G525.0200")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetGpuFabricInfoV", unsupported)
    monkeypatch.setattr(pynvml, "nvmlDeviceGetInforomImageVersion", unsupported)
    assert (nvml.fabric(None), nvml.inforom(None)) == ((0, 0, 0), "none")
