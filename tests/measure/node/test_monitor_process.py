"""The sampler process and the command: output, exit status, and that they always end."""

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fake_gpu import FakeGpu, FakeNvml, ReadingChange, cli_command, sampler_command
from waiting import WAIT_S, wait_until

from meltcore.common.errors import ConfigError, MeltcoreError
from meltcore.common.gpus.metrics import UNKNOWN
from meltcore.common.gpus.reader import Sample
from meltcore.common.gpus.select import select_gpus
from meltcore.measure.node.monitor import sampler
from meltcore.measure.node.monitor.console import gpu_line
from meltcore.measure.node.monitor.recording import decode_line, read_recording
from meltcore.measure.node.monitor.sampler import Monitor, SamplerSettings, record


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:  # also where it ends between open and read
        return False
    return state != "Z"


def start_monitor(path: Path, *gpus: FakeGpu, interval_s: float = 0.02, requested: str | None = None) -> Monitor:
    with patch.object(sampler, "SAMPLER_COMMAND", sampler_command(gpus or [FakeGpu()])):
        return Monitor(SamplerSettings(path=str(path), gpus=requested, interval_s=interval_s))


def command(
    *arguments: str | Path, gpus: list[FakeGpu] | None = None, cwd: Path | None = None
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        cli_command([FakeGpu()] if gpus is None else gpus, "monitor", *map(str, arguments)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
        start_new_session=True,
    )


class _Recording(io.RawIOBase):
    """A file that tells `on_sample` of every sample that is written to it."""

    def __init__(self, on_sample: Callable[[Sample], None]) -> None:
        self._on_sample = on_sample

    def write(self, line: Any) -> int:
        written = decode_line(bytes(line))
        assert isinstance(written, Sample)
        self._on_sample(written)
        return len(line)


@pytest.mark.parametrize("method", ["temperature_c", "gpm_supported"])
def test_gpu_whose_driver_call_hangs_stops_no_other(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it hangs before its first sample. Once it answers, it is sampled again."""
    monkeypatch.setattr(sampler, "_READ_LIMIT_S", 0.05)
    answers, stopping = threading.Event(), threading.Event()
    gpus = [FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")]
    nvml = FakeNvml(gpus)
    call = getattr(nvml, method)
    monkeypatch.setattr(
        nvml, method, lambda device: (device is gpus[0] or answers.wait(WAIT_S)) and call(device), raising=False
    )
    samples: list[Sample] = []

    def on_sample(sample: Sample) -> None:
        samples.append(sample)
        hung = [each for each in samples if each.gpu == 1 and each.hung]
        if len(hung) > 2 and sum(each.gpu == 0 for each in samples) > 5:
            answers.set()
        if sample.gpu == 1 and not sample.hung:
            stopping.set()

    end = record(nvml, select_gpus(nvml, None, {}), 0.01, _Recording(on_sample), stopping)
    times = [sample.t_s for sample in samples if sample.gpu == 1]
    assert times == sorted(times)
    assert end.reason == "stopped"
    hung = [sample for sample in samples if sample.hung and sample.gpu == 1]
    assert all(sample.read_s >= 0.05 and set(sample.values.values()) == {UNKNOWN} for sample in hung)
    assert "NO ANSWER of the driver for " in gpu_line(select_gpus(nvml, "1", {})[0].info, hung, 0.0)
    assert samples[-1].values["temperature_c"] == 45


@pytest.mark.slow
def test_samples_keep_their_interval_on_the_monotonic_clock(tmp_path: Path) -> None:
    before_s = time.monotonic()
    with start_monitor(tmp_path / "s.jsonl", interval_s=0.02) as monitor:
        wait_until(lambda: (tmp_path / "s.jsonl").read_bytes().count(b"\n") > 30)
        monitor.stop()
    samples = read_recording(tmp_path / "s.jsonl").gpu_samples(0)
    times = [sample.t_s for sample in samples]
    assert before_s < times[0] < times[-1] < time.monotonic()
    # Samples stay on the grid: each is on time or late, and lateness is not passed on to those that follow.
    assert monitor.end is not None
    # The grid begins when the first sample was due, which the sampler may have slept past on a busy machine.
    passed, most = round((times[-1] - times[0]) / 0.02), round((monitor.end.t_s - before_s) / 0.02)
    assert passed - 1 <= len(times) - 1 + monitor.end.missed <= most
    assert all(sample.gpm_window_s is not None for sample in samples), "the first sample already has a window"


def test_samples_are_returned_once_and_recording_holds_all(tmp_path: Path) -> None:
    with start_monitor(tmp_path / "s.jsonl", FakeGpu(uuid="GPU-a"), FakeGpu(uuid="GPU-b")) as monitor:
        wait_until(lambda: (tmp_path / "s.jsonl").stat().st_size > 8_000)
        samples = monitor.new_samples()
        samples += monitor.stop()
        assert monitor.new_samples() == []
    recording = read_recording(tmp_path / "s.jsonl")
    assert recording.samples == samples
    assert [gpu.uuid for gpu in recording.start.gpus] == ["GPU-a", "GPU-b"]
    assert {sample.gpu for sample in samples} == {0, 1}
    assert recording.end == monitor.end
    assert recording.end is not None
    assert recording.end.reason == "stopped"
    middle_s = samples[len(samples) // 2].t_s
    assert recording.gpu_samples(0, to_s=middle_s) + recording.gpu_samples(
        0, from_s=middle_s + 1e-9
    ) == recording.gpu_samples(0)


@pytest.mark.slow
def test_lost_gpu_stops_and_others_continue(tmp_path: Path) -> None:
    gpus = [FakeGpu(uuid="GPU-a", lost_after_s=0.4), FakeGpu(uuid="GPU-b")]
    with start_monitor(tmp_path / "s.jsonl", *gpus) as monitor:
        samples: list[Sample] = []
        wait_until(lambda: samples.extend(monitor.new_samples()) or any(sample.lost for sample in samples))
        num_seen = len(samples)
        wait_until(lambda: samples.extend(monitor.new_samples()) or len(samples) > num_seen + 5)
        samples += monitor.stop()
    lost, other = ([sample for sample in samples if sample.gpu == gpu] for gpu in (0, 1))
    assert [sample.lost for sample in lost] == [False] * (len(lost) - 1) + [True]
    assert other[-1].t_s > lost[-1].t_s
    assert not other[-1].lost


def test_sampler_ends_when_every_gpu_is_lost(tmp_path: Path) -> None:
    with start_monitor(tmp_path / "s.jsonl", FakeGpu(lost_after_s=0.2)) as monitor:
        wait_until(lambda: not monitor.is_running)
        samples = monitor.stop()
    assert samples[-1].lost
    assert monitor.end is not None
    assert monitor.end.reason == "all GPUs lost"


@pytest.mark.slow
def test_slow_readings_count_missed_intervals(tmp_path: Path) -> None:
    gpus = [FakeGpu(uuid=f"GPU-{n}") for n in range(40)]
    with start_monitor(tmp_path / "s.jsonl", *gpus, interval_s=0.001) as monitor:
        time.sleep(0.5)
        monitor.stop()
    assert monitor.end is not None
    assert monitor.end.missed > 0


def test_sampler_ends_on_error_in_the_block(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), start_monitor(tmp_path / "s.jsonl") as monitor:
        raise ZeroDivisionError
    assert not alive(monitor.pid)


def test_sampler_ends_when_parent_is_killed(tmp_path: Path) -> None:
    parent = command("--out", tmp_path / "s.jsonl")
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline().startswith("writing")
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) == 1
    finally:
        parent.kill()
        parent.communicate(timeout=WAIT_S)
    wait_until(lambda: not alive(int(children[0])))


def test_killed_sampler_leaves_readable_recording_without_end(tmp_path: Path) -> None:
    with start_monitor(tmp_path / "s.jsonl") as monitor:
        wait_until(lambda: monitor.new_samples())
        os.kill(monitor.pid, signal.SIGKILL)
        wait_until(lambda: not monitor.is_running)
        monitor.stop()
    assert monitor.end is None
    assert read_recording(tmp_path / "s.jsonl").end is None


def test_missing_gpus_and_unwritable_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there are GPUs 0 to 0"):
        start_monitor(tmp_path / "s.jsonl", requested="4")
    with pytest.raises(ConfigError, match="cannot write"):
        start_monitor(tmp_path / "none" / "s.jsonl")


def test_sampler_that_cannot_start_is_an_error_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "SAMPLER_COMMAND", [sys.executable, "-c", "raise SystemExit(9)"])
    with pytest.raises(MeltcoreError, match="ended before it had started"):
        Monitor(SamplerSettings(path=str(tmp_path / "s.jsonl")))


def test_other_file_is_no_recording(tmp_path: Path) -> None:
    (tmp_path / "x").write_text('{"type":"end","t_s":1,"missed":0,"cpu_s":0,"reason":"stopped"}\n')
    (tmp_path / "y").write_text("temperature,power\n")
    for name in ("x", "y", "missing"):
        with pytest.raises(ConfigError):
            read_recording(tmp_path / name)


@pytest.mark.slow
def test_command_prints_lines_and_summary_and_writes_json_lines(tmp_path: Path) -> None:
    gaming = FakeGpu(name="NVIDIA GeForce RTX 4090", uuid="GPU-b", architecture=8, refused={"power_w": 4})
    done = command("--duration", "1.2", gpus=[FakeGpu(), gaming], cwd=tmp_path)
    out, err = done.communicate(timeout=WAIT_S)
    assert (done.returncode, err) == (0, "")
    folder = next((tmp_path / "runs").iterdir())
    assert folder.name.endswith("-monitor")
    types = [json.loads(line)["type"] for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert (types[0], set(types[1:-1]), types[-1]) == ("start", {"sample"}, "end")
    first, second = (next(line for line in out.splitlines() if f" s  GPU {n}  " in line) for n in (0, 1))
    assert "500 W  SM 1980 MHz" in first
    assert "SM active 90 %" in first
    assert "? W" in second
    assert "SM active" not in second, "metrics that the GPU type lacks are left out"
    assert "GPU 1: NVIDIA GeForce RTX 4090" in out
    assert out.count("  HEALTHY") == 2
    assert "of a core" in out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_command_in_order(tmp_path: Path, number: int) -> None:
    running = command("--out", tmp_path / "s.jsonl")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("writing")
    assert "GPU 0" in running.stdout.readline()
    os.killpg(running.pid, number)  # as a terminal does, to every process of the group
    out, err = running.communicate(timeout=WAIT_S)
    assert (running.returncode, err) == (0, "")
    assert "HEALTHY" in out
    assert read_recording(tmp_path / "s.jsonl").end is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "status", "reason"),
    [
        (FakeGpu(changes=[ReadingChange(0.4, "ecc_uncorrected", 2)]), 1, "2 new ECC errors, uncorrected"),
        (FakeGpu(xids=[(0xFFFFFFFF, 79)]), 1, "XID 79 (the GPU has fallen off the bus)"),
        (FakeGpu(refused={"clock_reasons": 4}), 3, "clock reasons: unreadable"),
    ],
    ids=["ecc", "xid", "unknown"],
)
def test_exit_status_is_the_verdict(tmp_path: Path, gpu: FakeGpu, status: int, reason: str) -> None:
    done = command("--duration", "0.6", "--out", tmp_path / "s.jsonl", gpus=[gpu])
    out, _ = done.communicate(timeout=WAIT_S)
    assert done.returncode == status
    assert reason in out


def test_without_driver_one_line_status_3_and_no_folder(tmp_path: Path) -> None:
    """In a process that finds no NVML library, also where this machine has one."""
    code = (
        "import sys; from meltcore.measure.node.monitor import sampler\n"
        "script = 'import ctypes\\ndef none(*a, **k): raise OSError\\nctypes.CDLL = none\\n'\n"
        "script += 'from meltcore.measure.node.monitor.sampler import main; main()'\n"
        "sampler.SAMPLER_COMMAND = [sys.executable, '-c', script]\n"
        "from meltcore.cli.main import main; sys.exit(main(['monitor']))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, cwd=tmp_path, check=False
    )
    assert done.returncode == 3
    assert done.stderr.startswith("meltcore monitor: no NVIDIA driver here")
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [["--interval-ms", "1"], ["--interval-ms", "x"], ["--duration", "0"]])
def test_settings_out_of_range_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    from meltcore.cli.main import main

    with pytest.raises(SystemExit) as exit_info:
        main(["monitor", *arguments])
    assert exit_info.value.code == 2
    assert arguments[1] in capsys.readouterr().err


def test_sampler_process_imports_no_torch_and_little_else() -> None:
    code = (
        "import sys, meltcore.measure.node.monitor.sampler; "
        "sys.exit(any(m in sys.modules for m in ('torch', 'numpy', 'rich')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=WAIT_S, check=False).returncode == 0
