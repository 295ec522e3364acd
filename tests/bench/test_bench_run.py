"""The whole command on scripted engines and scripted GPUs: what it writes, says and returns."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_bench_engine import program

from meltcore.bench.assemble import assemble
from meltcore.bench.claim import claimed
from meltcore.bench.device import Device
from meltcore.bench.engine_process import EngineError
from meltcore.bench.run import BenchConfig, run_bench
from meltcore.errors import ConfigError
from meltcore.hardware.fake import Change, FakeGpu
from meltcore.hardware.recording import read_recording
from meltcore.results.runfolder import RunFolder, read_result
from meltcore.results.score import ScoredRun

GIB = 2**30

# The command with scripted GPUs and engines behind it: nothing else is changed.
_COMMAND = """
import sys, msgspec
from meltcore.bench import run
from meltcore.hardware.fake import FakeGpu
real, program = run.BenchConfig, tuple(msgspec.json.decode(sys.argv[1]))
fake = msgspec.json.decode(sys.argv[2], type=list[FakeGpu])
run.BenchConfig = lambda **settings: real(**settings, program=program, fake_gpus=fake, levels=(1, 10))
from meltcore.cli.main import main
sys.exit(main(["bench", *sys.argv[3:]]))
"""


@pytest.fixture(autouse=True)
def _runs_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meltcore.bench.run.SHORTEST_S", 1.0)


def uuid(number: int) -> str:
    """Of this process alone: a bench claims its GPUs against every other on the machine."""
    return f"GPU-{number}-{os.getpid()}"


def gpus(count: int = 1, **changes: Any) -> list[FakeGpu]:
    """Each takes 500 W by its energy counter, as near as a test needs, and has nothing in its memory."""
    energy = [Change(second / 10, "energy_j", 1e6 + 50.0 * second) for second in range(300)]
    settings = {"changes": energy, "readings": {"memory_used_bytes": GIB / 2}} | changes
    return [FakeGpu(uuid=uuid(number), **settings) for number in range(count)]


def run(folder: Path, fake: list[FakeGpu] | None, **settings: Any) -> tuple[RunFolder, ScoredRun, list[str]]:
    said: list[str] = []
    script = settings.pop("script", {})
    config = BenchConfig(
        duration_s=settings.pop("duration_s", 4.0),
        out=folder / "runs",
        levels=(1, 10),
        program=program(folder / "emitted", **({"period_s": 0.005} | script)),
        fake_gpus=fake,
        **settings,
    )
    result = run_bench(config, said.append, lambda device, level, last: said.append(f"{device.label} {last}"))
    return *result, said


def check_measured(result: ScoredRun) -> None:
    """Complete, with nothing against it but how busy this machine was meanwhile."""
    assert (result.status, result.verdict) in (("complete", "OK"), ("complete", "CLIENT_BOUND"))
    assert [reason for reason in result.reasons if "too busy with other things" not in reason] == []
    assert (result.verdict == "OK") == (result.reasons == [])


def test_two_gpus_run_at_once_and_each_sees_its_own(tmp_path: Path) -> None:
    small = FakeGpu(
        uuid=uuid(9), readings={"memory_total_bytes": 6 * GIB, "memory_used_bytes": 0}, changes=gpus()[0].changes
    )
    folder, result, said = run(tmp_path, [*gpus(), small], arguments=("bench",))
    check_measured(result)
    assert read_result(folder.path) == result
    score = result.score
    first, second = score.devices
    assert (first.label, second.label) == ("GPU 0", "GPU 1")
    assert score.output_tokens_per_s == pytest.approx(
        (first.output_tokens_per_s or 0) + (second.output_tokens_per_s or 0)
    )
    assert first.sustained is not None
    assert second.sustained is not None
    overlap = min(first.sustained.end_s, second.sustained.end_s) - max(
        first.sustained.start_s, second.sustained.start_s
    )
    assert overlap > 1.5
    heads = [json.loads((tmp_path / f"emitted.{each}").read_text().splitlines()[0]) for each in (uuid(0), uuid(9))]
    assert [head["gpu"] for head in heads] == [uuid(0), uuid(9)]
    assert heads[0]["config"]["max_num_seqs"] == 1024
    assert heads[1]["config"]["max_num_seqs"] < 64, "six gigabytes hold no thousand"
    assert heads[0]["config"]["load_format"] == "dummy"
    assert said[1:].count("GPU 0 True") == said[1:].count("GPU 1 True") == 1
    _check_telemetry(folder, result)


def _check_telemetry(folder: RunFolder, result: ScoredRun) -> None:
    """Of the same run: health, energy by the counter, time lines on the same clock."""
    device = result.score.devices[0]
    assert device.health is not None
    assert (device.health.verdict, device.health.reasons) == ("HEALTHY", [])
    assert device.sustained is not None
    assert device.sustained.power_w == pytest.approx(500.0, rel=0.05)
    rate = device.sustained.output_tokens_per_s
    assert device.sustained.tokens_per_joule == pytest.approx(rate / 500.0, rel=0.05)
    assert result.score.tokens_per_joule == pytest.approx(rate / 500.0, rel=0.1)
    utilization = next(row for row in device.health.metrics if row.key == "nvml_utilization_percent")
    assert (utilization.mean, "never judged" in utilization.note) == (100, True)
    assert device.lines is not None
    lengths = {len(values) for values in device.lines.values.values()}
    assert len(lengths) == 1
    assert set(device.lines.values["power_w"]) == {500.0}
    tokens = device.lines.values["output_tokens_per_s"]
    assert tokens[1] == pytest.approx(rate, rel=0.5)
    recording = read_recording(folder.path / "samples.jsonl")
    assert recording.end is not None
    assert recording.start.interval_s == 0.1
    assert "GPU score" in folder.report_path.read_text()
    assert result.score.not_comparable == ["the ladder was 1, 10"]


def test_a_gpu_that_is_not_well_is_degraded_in_the_result(tmp_path: Path) -> None:
    changes = [*gpus()[0].changes, Change(2.5, "ecc_uncorrected", 2)]
    _, result, _ = run(tmp_path, gpus(changes=changes, refused={"clock_reasons": 4}))
    assert result.score.health == "DEGRADED"
    health = result.score.devices[0].health
    assert health is not None
    assert health.reasons[0] == "2 new ECC errors, uncorrected"
    assert any("clock reasons: unreadable" in reason for reason in health.reasons)
    check_measured(result)  # the number is right; the GPU is not


def test_a_gpu_lost_on_the_way_is_degraded_whatever_its_engine_says(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, gpus(lost_after_s=2.5))
    device = result.score.devices[0]
    assert device.health is not None
    assert (device.health.verdict, device.health.reasons[0][:16]) == ("DEGRADED", "the GPU was lost")
    assert device.sustained is not None
    assert device.sustained.power_w is None, "nothing is known beyond the last sample"


def test_an_engine_that_dies_leaves_a_partial_result_without_a_score(tmp_path: Path) -> None:
    folder, result, _ = run(tmp_path, gpus(), script={"fault": "die", "after_s": 2.0})
    assert (result.verdict, result.status) == ("FAILED", "partial")
    assert result.score.output_tokens_per_s is None
    assert "exit status 7" in result.reasons[0]
    assert "the run did not get to its end" in result.score.not_comparable
    assert result.score.devices[0].levels
    assert "no score" in folder.report_path.read_text()


@pytest.mark.parametrize("fault", ["fail_at_start", "die"])
def test_one_gpu_that_fails_stops_no_other_and_there_is_no_sum(tmp_path: Path, fault: str) -> None:
    _, result, _ = run(tmp_path, gpus(2), duration_s=3.0, script={"fault": fault, "after_s": 0.3, "only": uuid(1)})
    sound, broken = result.score.devices
    assert (sound.failure, broken.sustained) == (None, None)
    assert sound.output_tokens_per_s is not None
    assert (result.verdict, result.score.output_tokens_per_s) == ("FAILED", None)
    assert result.reasons == [f"GPU 1: {broken.failure}"]


def test_no_engine_at_all_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="GPU 0: 6 GiB do not hold the weights"):
        run(tmp_path, gpus(), script={"fault": "fail_at_start"})


def test_a_cpu_runs_and_is_not_comparable(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, None, cpu=True, script={"ready": {"dtype": "float32", "parameters": 1_929_920}})
    assert result.score.devices[0].health is None
    assert [reason.split(":")[0] for reason in result.score.not_comparable] == [
        "measured on a CPU",
        "the model has 1,929,920 parameters; Qwen3-0.6B has 596,049,920",
        "computed in float32, not bfloat16",
        "the ladder was 1, 10",
    ]
    assert result.score.tokens_per_joule is None


def test_fp8_is_a_workload_of_its_own(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, gpus(), precision="fp8", script={"ready": {"dtype": "bfloat16+fp8-weights+fp8-kv"}})
    assert result.score.workload == "gpu-score-fp8/1"
    assert not any("computed in" in reason for reason in result.score.not_comparable)
    settings = result.score.devices[0].engine_settings
    assert (settings["quantization"], settings["kv_cache_dtype"]) == ("fp8", "fp8")


def test_an_engine_that_computes_in_another_precision_is_not_comparable(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, gpus(), precision="fp8")
    assert "computed in bfloat16, not bfloat16+fp8-weights+fp8-kv" in result.score.not_comparable


@pytest.mark.parametrize(("precision", "cpu"), [("int4", False), ("fp8", True)])
def test_a_precision_that_cannot_be_had_is_refused(precision: str, cpu: bool) -> None:
    with pytest.raises(ConfigError, match=f"--precision.*{precision}"):
        BenchConfig(precision=precision, cpu=cpu)


def test_gpus_by_index_and_by_the_beginning_of_a_uuid(tmp_path: Path) -> None:
    part_of_it = f"MIG-5c89-{os.getpid()}"
    mig = FakeGpu(uuid=uuid(2), slices={part_of_it: 1}, changes=gpus()[0].changes)
    _, result, _ = run(tmp_path, [*gpus(2), mig], gpus="1,MIG-5c")
    assert [device.uuid for device in result.score.devices] == [uuid(1), part_of_it]
    assert (tmp_path / f"emitted.{part_of_it}").exists()
    whole, part = result.score.devices
    assert whole.sustained is not None
    assert part.sustained is not None
    assert whole.sustained.tokens_per_joule is not None
    assert part.sustained.tokens_per_joule is None, "the energy counter is the whole board's"
    with pytest.raises(ConfigError, match="there are GPUs 0 to 2"):
        run(tmp_path, [*gpus(2), mig], gpus="3")


def test_a_gpu_divided_by_mig_is_measured_slice_by_slice(tmp_path: Path) -> None:
    """An engine that sees the board's UUID would run on one slice and be taken for the whole board."""
    parts = [f"MIG-{number}-{os.getpid()}" for number in (1, 2)]
    divided = FakeGpu(uuid=uuid(0), slices={parts[0]: 1, parts[1]: 2}, changes=gpus()[0].changes)
    _, result, _ = run(tmp_path, [divided], duration_s=2.0)
    assert [device.uuid for device in result.score.devices] == parts
    assert [device.memory_bytes for device in result.score.devices] == [141 * GIB // 8] * 2
    assert all((tmp_path / f"emitted.{part}").exists() for part in parts)


def test_what_cuda_is_told_to_see_is_measured_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"1,{uuid(1)}")
    _, result, _ = run(tmp_path, gpus(2), duration_s=2.0)
    assert [device.label for device in result.score.devices] == ["GPU 1"]
    assert (tmp_path / f"emitted.{uuid(1)}").exists(), "the engine sees it by its UUID"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='-1' hides every GPU"):
        run(tmp_path / "hidden", gpus(2))
    assert not (tmp_path / "hidden" / "runs").exists(), "nothing was measured, nothing is left"


def test_a_gpu_that_another_bench_measures_is_refused(tmp_path: Path) -> None:
    device = Device(name="NVIDIA H200", label="GPU 0", settings={}, uuid=uuid(0))
    with claimed([device]), pytest.raises(ConfigError, match="GPU 0 is being measured by another meltcore bench"):
        run(tmp_path, gpus())
    assert not (tmp_path / "emitted").exists()
    with claimed([device]):
        pass


def test_memory_that_others_hold_is_told(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, gpus(readings={"memory_used_bytes": 12 * GIB}), duration_s=2.0)
    assert result.score.devices[0].memory_in_use_bytes == 12 * GIB
    assert any("12.0 GiB of its memory were in use before the run" in note for note in result.notes)


def test_settings_that_cannot_work_are_refused() -> None:
    for duration_s in (0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"at least 1 s; got {duration_s}"):
            BenchConfig(duration_s=duration_s)
    with pytest.raises(ConfigError, match="exclude each other"):
        BenchConfig(cpu=True, gpus="0")


def command(folder: Path, *arguments: str, **script: Any) -> subprocess.Popen[str]:
    engine = msgspec.json.encode(program(folder / "emitted", **({"period_s": 0.005} | script))).decode()
    fake = msgspec.json.encode(gpus()).decode()
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, engine, fake, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )


def test_the_command_prints_levels_as_they_end_and_the_number_last(tmp_path: Path) -> None:
    done = command(tmp_path, "--duration", "10")
    out, err = done.communicate(timeout=40)
    assert (done.returncode, err) == (0, "")
    lines = [line for line in out.splitlines() if line.strip()]
    assert lines[0].startswith("gpu-score/1: Qwen3-0.6B with random weights on GPU 0 (NVIDIA H200)")
    assert lines[1].split()[:5] == ["GPU", "0", "1", "at", "once"]
    assert "HEALTHY" in out
    assert "In the sustained window: 500 W (at most 500), 45 °C" in out
    assert "output tokens/s  (gpu-score/1, Qwen/Qwen3-0.6B, bfloat16, dummy weights, engine" in lines[-2]
    assert lines[-1].startswith("report: runs/")


def test_the_exit_status_says_that_there_is_no_score(tmp_path: Path) -> None:
    died = command(tmp_path, "--duration", "10", fault="die", after_s=1.0)
    out, _ = died.communicate(timeout=40)
    assert died.returncode == 1
    assert "no score" in out
    assert "exit status 7" in out
    unready = command(tmp_path, "--duration", "10", fault="fail_at_start")
    _, err = unready.communicate(timeout=40)
    assert (unready.returncode, err) == (2, "meltcore bench: GPU 0: 6 GiB do not hold the weights\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_keeps_what_was_measured_and_ends_everything(tmp_path: Path, number: int) -> None:
    running = command(tmp_path, "--duration", "60", "--json")
    assert running.stderr is not None
    while "at once" not in running.stderr.readline():
        pass
    os.killpg(running.pid, number)
    asked_s = time.monotonic()
    time.sleep(0.2)
    os.killpg(running.pid, number)  # impatience loses nothing
    out, _ = running.communicate(timeout=20)
    assert time.monotonic() - asked_s < 10
    assert running.returncode == 130
    result = msgspec.json.decode(out, type=ScoredRun)
    assert (result.status, result.verdict, result.score.output_tokens_per_s) == ("partial", "PARTIAL", None)
    assert result.score.devices[0].levels
    assert processes_of(tmp_path) == []


def test_an_interruption_when_all_is_measured_comes_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_assemble(*args: Any, **kwargs: Any) -> ScoredRun:
        signal.raise_signal(signal.SIGINT)
        return assemble(*args, **kwargs)

    monkeypatch.setattr("meltcore.bench.run.assemble", interrupted_assemble)
    folder, result, _ = run(tmp_path, gpus(), duration_s=2.0)
    check_measured(result)
    assert read_result(folder.path) == result
    assert folder.report_path.exists()


def test_an_interruption_before_the_first_level_leaves_nothing_running(tmp_path: Path) -> None:
    running = command(tmp_path, "--duration", "60", fault="never_ready")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("gpu-score/1")
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=20)
    assert (running.returncode, err) == (130, "meltcore bench: interrupted\n")
    assert processes_of(tmp_path) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines of the scripted engines and samplers of `folder` that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]
