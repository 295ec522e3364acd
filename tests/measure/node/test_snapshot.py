"""Snapshots and differences between two."""

from pathlib import Path

import msgspec
import pytest
from certify_tools import certified, h200s, node_of
from fake_gpu import FakeGpu, FakeNvml
from fake_node import FakeNode
from pynvml import NVML_ERROR_UNKNOWN, NVMLError

from meltcore.cli.main import main
from meltcore.common.files import read_document
from meltcore.measure.documents.node import NOT_APPLICABLE, UNKNOWN, Snapshot
from meltcore.measure.node.snapshot import diff_snapshots, snapshot_lines, take_snapshot

NOT_SUPPORTED, NO_PERMISSION = 3, 4


def snapshot_of(node: FakeNode, requested: str | None = None) -> Snapshot:
    return take_snapshot(node, node.gpus(requested))


def test_snapshot_holds_every_link_and_path() -> None:
    node = node_of(h200s(4), files={"/sys/bus/pci/devices/0000:01:00.0/numa_node": "1\n"})
    snapshot = snapshot_of(node)
    assert [len(gpu.links_up()) for gpu in snapshot.gpus] == [18] * 4
    assert snapshot.gpus[0].links[0].speed_gbps == pytest.approx(26.562)
    assert snapshot.topology[0] == ["X", "NV18", "NV18", "NV18"]
    assert snapshot.gpus[0].facts["sm_count"] == 132
    assert snapshot.gpus[1].facts["numa_node"] == 1
    assert snapshot.gpus[0].facts["numa_node"] == UNKNOWN, "no such file"
    text = "\n".join(snapshot_lines(snapshot))
    assert "18 x up, 26.562 GB/s, to switch" in text
    assert "141 GiB" in text


def test_path_without_links_is_pcie() -> None:
    gpus = h200s(2)
    for gpu in gpus:
        gpu.links_down = list(range(18))
    assert snapshot_of(node_of(gpus)).topology == [["X", "SYS"], ["SYS", "X"]]


def test_snapshot_holds_selected_gpus_only() -> None:
    assert [gpu.index for gpu in snapshot_of(node_of(h200s(4)), "2").gpus] == [2]


def test_unknown_and_not_applicable_are_distinguished() -> None:
    gpu = FakeGpu(
        name="NVIDIA GeForce RTX 5090", architecture=10, refused={"ecc_on": NOT_SUPPORTED, "vbios": NO_PERMISSION}
    )
    facts = snapshot_of(node_of([gpu])).gpus[0].facts
    assert (facts["ecc_on"], facts["vbios"]) == (NOT_APPLICABLE, UNKNOWN)
    facts = snapshot_of(node_of([FakeGpu(refused={"ecc_on": NOT_SUPPORTED})])).gpus[0].facts
    assert facts["ecc_on"] == UNKNOWN, "an H200 has ECC, whatever the driver reports"


def test_clocks_and_temperature_are_no_difference() -> None:
    gpus = h200s(2)
    old = snapshot_of(node_of(gpus))
    gpus[0].readings.update(temperature_c=80, sm_clock_mhz=345, pcie_generation=1, clock_reasons=1)
    assert diff_snapshots(old, snapshot_of(node_of(gpus))) == []


def test_differences_are_listed_by_uuid() -> None:
    gpus = h200s(3)
    old = snapshot_of(node_of(gpus))
    gpus[1].readings.update(power_limit_w=500, ecc_corrected=9, ecc_corrected_lifetime=2)
    gpus[1].links_down = [7]
    new = snapshot_of(node_of([gpus[1], gpus[2], FakeGpu(uuid="GPU-new", bus_id="0000:77:00.0")]))
    new.driver = "590.00.00"
    assert diff_snapshots(old, new) == [
        "driver: 580.00.00 -> 590.00.00",
        f"GPU 0 NVIDIA H200 ({gpus[0].uuid}) is gone",
        "GPU 0 index: 1 -> 0",
        "GPU 0 ECC corrected since the driver loaded: 3 -> 9",
        "GPU 0 power limit: 700.0 -> 500.0",
        "GPU 0 NVLink 7 (state, GB/s, peer): ('up', 26.562, 'switch') -> ('down', None, 'UNKNOWN')",
        "GPU 1 index: 2 -> 1",
        "GPU 2 NVIDIA H200 (GPU-new) is new",
    ]


def test_command_reads_its_json_and_exits_1_on_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["snapshot", "--json"]) == 0
    path = tmp_path / "old.json"
    path.write_text(capsys.readouterr().out)
    assert main(["snapshot", "--diff", str(path)]) == 0
    old = read_document(path, Snapshot)
    old.fingerprint.kernel = "Linux 2.6"
    path.write_bytes(msgspec.json.encode(old))
    assert main(["snapshot", "--diff", str(path)]) == 1
    assert "kernel: Linux 2.6 -> " in capsys.readouterr().out


def test_certificate_can_be_the_old_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    certificate = certified(tmp_path, node_of(h200s(1)), "quick")
    (tmp_path / "certificate.json").write_bytes(msgspec.json.encode(certificate))
    assert main(["snapshot", "--diff", str(tmp_path / "certificate.json")]) == 1
    assert "(GPU-00000000-fake) is gone" in capsys.readouterr().out
    (tmp_path / "other.json").write_text('{"tuning_version": 1}')
    for name in ("other.json", "missing.json"):
        assert main(["snapshot", "--diff", str(tmp_path / name)]) == 2


def test_refusing_driver_is_an_error_not_a_difference(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: object) -> None:
        raise NVMLError(NVML_ERROR_UNKNOWN)

    monkeypatch.setattr("meltcore.common.gpus.driver.Nvml", lambda: FakeNvml([FakeGpu()]))
    monkeypatch.setattr(FakeNvml, "gpus", refuse)
    assert main(["snapshot"]) == 2
    assert "does not list its GPUs: Unknown Error" in capsys.readouterr().err


def test_file_that_is_no_snapshot_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text("{}")
    assert main(["snapshot", "--diff", str(tmp_path / "x.json")]) == 2
    assert "is not a meltcore document" in capsys.readouterr().err
