"""`meltcore certify` from the command line: exit codes as Nagios has them, files, baselines."""

import json
import signal
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGpu, ReadingChange
from fake_node import FakeNode
from pynvml import NVML_ERROR_TIMEOUT, NVMLError
from sample_certificates import h200s, node

from meltcore.cli.load import _recorded
from meltcore.cli.main import main
from meltcore.common.errors import MeltcoreError
from meltcore.common.gpus.driver import GpuLostError, NvmlWithTimeout
from meltcore.common.process import CompletedRun


def certify(monkeypatch: pytest.MonkeyPatch, scripted: FakeNode, *arguments: str) -> int:
    def node_of(nvml: object) -> FakeNode:
        assert isinstance(nvml, NvmlWithTimeout), "no call to the driver may wait forever"
        return scripted

    monkeypatch.setattr("meltcore.common.gpus.driver.Nvml", lambda: scripted.nvml)
    monkeypatch.setattr("meltcore.measure.node.node.Node", node_of)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return main(["certify", *arguments])


def warm(gpus: list[FakeGpu]) -> list[FakeGpu]:
    gpus[0].changes = [ReadingChange(1.0, "clock_reasons", 0x40)]
    return gpus


@pytest.mark.parametrize(
    ("scripted", "code", "word"),
    [
        (node(h200s(2)), 0, "PASS"),
        (node(warm(h200s(2))), 1, "WARN"),
        (node(h200s(2), slow=(1,)), 2, "FAIL"),
    ],
)
def test_each_verdict_has_its_exit_code_and_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    scripted: FakeNode,
    code: int,
    word: str,
) -> None:
    assert certify(monkeypatch, scripted, "--out", str(tmp_path)) == code
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{word} quick, 2 GPUs")
    (folder,) = tmp_path.iterdir()
    assert {"certificate.json", "certificate.html"} <= {file.name for file in folder.iterdir()}


def test_hang_exits_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = node(h200s(1))
    scripted.hung = {"memory"}
    assert certify(monkeypatch, scripted, "--out", str(tmp_path)) == 3


def test_interruption_keeps_measurements_and_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = node(h200s(1))
    run = scripted.run

    def interrupted(command: Sequence[str], *rest: Any) -> CompletedRun:
        if command[-1] == "memory":
            signal.raise_signal(signal.SIGTERM)
        return run(command, *rest)

    monkeypatch.setattr(scripted, "run", interrupted)
    assert certify(monkeypatch, scripted, "--json", "--out", str(tmp_path)) == 3
    found = json.loads(capsys.readouterr().out)
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    requested = {"state": "PASS", "gemm": "PASS", "memory": "UNKNOWN", "host": "UNKNOWN", "collectives": "UNKNOWN"}
    requested["system"] = "UNKNOWN"
    assert (found["verdict"], verdicts) == ("UNKNOWN", requested)
    assert "Memory bandwidth: not finished: interrupted" in found["unverified"]
    [folder] = tmp_path.iterdir()
    assert (folder / "certificate.html").exists()


@pytest.mark.parametrize(
    ("error", "verdict", "code", "reason"),
    [
        (ZeroDivisionError("a bug"), "UNKNOWN", 3, "ZeroDivisionError: a bug"),
        (GpuLostError("GPU 0 is lost"), "FAIL", 2, "GPU 0 is lost"),
    ],
)
def test_error_of_one_check_keeps_the_reports_of_the_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    verdict: str,
    code: int,
    reason: str,
) -> None:
    """Nothing was written: the reports of an hour were lost by the last check."""
    scripted = node(h200s(1))
    run = scripted.run

    def fails(command: Sequence[str], *rest: Any) -> CompletedRun:
        if command[-1] == "memory":
            raise error
        return run(command, *rest)

    monkeypatch.setattr(scripted, "run", fails)
    assert certify(monkeypatch, scripted, "--json", "--out", str(tmp_path)) == code
    found = json.loads(capsys.readouterr().out)
    verdicts = {check["name"]: check["verdict"] for check in found["checks"]}
    assert verdicts == {**dict.fromkeys(("state", "gemm", "host", "system"), "PASS"), "memory": verdict} | {
        "collectives": "NOT_APPLICABLE"
    }
    assert f"Memory bandwidth: not finished: {reason}" in found["unverified"]
    [folder] = tmp_path.iterdir()
    assert (folder / "certificate.html").exists()


def test_gpu_about_which_the_driver_hangs_is_named_and_the_others_are_certified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted = node(h200s(2))
    name, hanging = scripted.nvml.name, scripted.nvml.device(1)

    def name_in_time(handle: object) -> str:
        if handle is hanging:
            raise NVMLError(NVML_ERROR_TIMEOUT)
        return name(handle)

    monkeypatch.setattr(scripted.nvml, "name", name_in_time)
    assert certify(monkeypatch, scripted, "--out", str(tmp_path / "all")) == 3
    assert "does not answer about GPU 1; look in the kernel log; certify the others with --gpu 0" in (
        capsys.readouterr().err
    )
    assert certify(monkeypatch, scripted, "--out", str(tmp_path), "--gpu", "0") == 0


def test_without_driver_is_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pynvml")
    from meltcore.common.gpus.driver import NoDriverError, Nvml

    try:
        Nvml().close()
    except NoDriverError:
        assert main(["certify", "--out", str(tmp_path)]) == 3
        assert "UNKNOWN: no NVIDIA driver" in capsys.readouterr().err
        assert main(["bench", "--out", str(tmp_path / "runs")]) == 2
        assert capsys.readouterr().err.strip().endswith("(docker run --gpus all); --cpu measures on the CPU")
        assert list(tmp_path.iterdir()) == []
    else:
        pytest.skip("this machine has a driver")


_MISMATCHED_SAMPLER = """
import pynvml
from meltcore.measure.node.monitor import sampler
def fail():
    raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
pynvml.nvmlInit = fail
sampler.main()
"""


def test_faulty_driver_stops_every_command_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A library that does not fit the kernel module was taken for a machine without GPUs."""
    import pynvml

    from meltcore.measure.node.monitor import sampler

    def fail() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(pynvml, "nvmlInit", fail)
    monkeypatch.setattr(sampler, "SAMPLER_COMMAND", (sys.executable, "-c", _MISMATCHED_SAMPLER))
    monkeypatch.chdir(tmp_path)
    for command, status in ({"certify": 3, "snapshot": 2, "monitor": 2, "bench": 2}).items():
        assert main([command]) == status, command
        error = capsys.readouterr().err
        assert "the NVIDIA driver does not start: " in error, command
        assert "different versions, as after an update: reboot" in error, command
        assert "no NVIDIA driver" not in error, command
    with (
        pytest.raises(MeltcoreError, match="does not start"),
        _recorded(Namespace(monitor=False, gpu=None), tmp_path / "gpus.jsonl", tries=True),
    ):
        raise AssertionError("a load on a faulty driver was not stopped")


def test_gpu_lost_before_start_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lost(self: object) -> None:
        raise GpuLostError("GPU 3 is lost")

    monkeypatch.setattr("fake_gpu.FakeNvml.gpus", lost)
    assert certify(monkeypatch, node(h200s(1)), "--out", str(tmp_path)) == 2
    assert "meltcore certify: FAIL: GPU 3 is lost" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [["--tier", "best"], ["--hours", "x"], ["--nonsense"]])
def test_wrong_usage_is_unknown(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["certify", *wrong])
    assert ended.value.code == 3
    assert "meltcore certify: UNKNOWN: " in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [["--tier", "soak"], ["--hours", "2"]])
def test_hours_without_soak_are_refused_before_driver_loads(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["certify", *wrong]) == 3
    assert "UNKNOWN: a soak needs --hours" in capsys.readouterr().err


def test_own_crash_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*arguments: object, **named: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("meltcore.measure.node.certify.checks.run.certify", broken)
    assert certify(monkeypatch, node(h200s(1)), "--out", str(tmp_path)) == 3
    assert "a bug" in capsys.readouterr().err


def test_sampler_that_cannot_be_ended_does_not_lose_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hangs(self: object) -> None:
        raise MeltcoreError("the sampler hangs in the driver")

    monkeypatch.setattr("fake_node.FakeTelemetry.close", hangs)
    assert certify(monkeypatch, node(h200s(1)), "--json", "--out", str(tmp_path)) == 0
    assert "the sampler hangs in the driver" in json.loads(capsys.readouterr().out)["notes"]


def test_json_is_the_only_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    certify(monkeypatch, node(h200s(1)), "--json", "--out", str(tmp_path))
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["tier"], found["schema_version"]) == ("PASS", "quick", 2)


def test_earlier_certificate_is_a_baseline_unless_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert certify(monkeypatch, node(h200s(2)), "--out", str(tmp_path / "good")) == 0
    assert certify(monkeypatch, node(h200s(2), slow=(1,)), "--out", str(tmp_path / "bad")) == 2
    (good,) = (tmp_path / "good").glob("*/certificate.json")
    (bad,) = (tmp_path / "bad").glob("*/certificate.json")
    again = ("--out", str(tmp_path / "again"), "--baseline")
    assert certify(monkeypatch, node(h200s(2)), *again, str(good)) == 0
    capsys.readouterr()
    assert certify(monkeypatch, node(h200s(2)), *again, str(bad)) == 3
    assert "cannot be a baseline" in capsys.readouterr().err
