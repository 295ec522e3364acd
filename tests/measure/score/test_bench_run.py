"""The whole command on scripted engines and scripted GPUs: files, output and exit status."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from statistics import fmean
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from fake_gpu import FakeGpu, ReadingChange, sampler_command
from scripted_bench_engine import program
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.measure.documents.runfolder import RunFolder, read_result
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.load.run.surroundings import Surroundings
from meltcore.measure.node.monitor import sampler
from meltcore.measure.node.monitor.recording import read_recording
from meltcore.measure.score import engine_process
from meltcore.measure.score import run as bench_run
from meltcore.measure.score.assemble import assemble
from meltcore.measure.score.config import BenchConfig
from meltcore.measure.score.device import Device
from meltcore.measure.score.engine_process import EngineError
from meltcore.measure.score.run import claim, run_bench

GIB = 2**30

# The command with scripted GPUs and engines; nothing else is changed.
_COMMAND = """
import sys, msgspec
from meltcore.measure.score import engine_process, run
from meltcore.measure.node.monitor import sampler
engine_process.ENGINE_COMMAND = msgspec.json.decode(sys.argv[1])
sampler.SAMPLER_COMMAND = msgspec.json.decode(sys.argv[2])
run.ladder_concurrencies = lambda is_cpu: (1, 10)
from meltcore.cli.main import main
sys.exit(main(["bench", *sys.argv[3:]]))
"""


@pytest.fixture(autouse=True)
def _runs_of_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meltcore.measure.score.config.MIN_DURATION_S", 1.0)


def uuid(number: int) -> str:
    """Unique to this process: a bench claims its GPUs against all others on the machine."""
    return f"GPU-{number}-{os.getpid()}"


def gpus(count: int = 1, **changes: Any) -> list[FakeGpu]:
    """Each takes about 500 W by its energy counter and has an empty memory."""
    energy = [ReadingChange(second / 10, "energy_j", 1e6 + 50.0 * second) for second in range(300)]
    settings = {"changes": energy, "readings": {"memory_used_bytes": GIB / 2}} | changes
    return [FakeGpu(uuid=uuid(number), **settings) for number in range(count)]


def run(folder: Path, fake: list[FakeGpu] | None, **settings: Any) -> tuple[RunFolder, ScoredRun, list[str]]:
    lines: list[str] = []
    script = {"period_s": 0.005} | settings.pop("script", {})
    config = BenchConfig(
        duration_s=settings.pop("duration_s", 4.0),
        out=str(folder / "runs"),
        **settings,
    )
    with (
        patch.object(sampler, "SAMPLER_COMMAND", sampler_command(fake or [])),
        patch.object(engine_process, "ENGINE_COMMAND", program(folder / "emitted", **script)),
        patch.object(bench_run, "ladder_concurrencies", lambda is_cpu: (1, 10)),
    ):
        result = run_bench(config, lines.append, lambda device, level, last: lines.append(f"{device.label} {last}"))
    return *result, lines


def check_measured(result: ScoredRun) -> None:
    """Complete, without reasons but the load of this machine."""
    assert (result.status, result.verdict) in (("complete", "OK"), ("complete", "CLIENT_BOUND"))
    assert [reason for reason in result.reasons if "kept the machine busy" not in reason] == []
    assert (result.verdict == "OK") == (result.reasons == [])


@pytest.mark.slow
def test_two_gpus_run_concurrently_and_each_engine_sees_its_own(tmp_path: Path) -> None:
    small = FakeGpu(
        uuid=uuid(9), readings={"memory_total_bytes": 6 * GIB, "memory_used_bytes": 0}, changes=gpus()[0].changes
    )
    folder, result, lines = run(tmp_path, [*gpus(), small], arguments=("bench",))
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
    assert heads[1]["config"]["max_num_seqs"] < 64, "6 GB do not hold a thousand"
    assert heads[0]["config"]["load_format"] == "dummy"
    assert lines[1:].count("GPU 0 True") == lines[1:].count("GPU 1 True") == 1
    _check_telemetry(folder, result)


def _check_telemetry(folder: RunFolder, result: ScoredRun) -> None:
    """Of the same run: health, energy by the counter, time series on the same clock."""
    device = result.score.devices[0]
    assert device.health is not None
    assert (device.health.verdict, device.health.reasons) == ("HEALTHY", [])
    assert device.sustained is not None
    assert device.sustained.power_w == pytest.approx(500.0, rel=0.05)
    rate = device.sustained.output_tokens_per_s
    assert device.sustained.tokens_per_joule == pytest.approx(rate / 500.0, rel=0.05)
    sustained = [each.sustained for each in result.score.devices if each.sustained is not None]
    power_w = sum(each.power_w or 0 for each in sustained)
    tokens_per_joule = sum(each.output_tokens_per_s for each in sustained) / power_w
    assert result.score.tokens_per_joule == pytest.approx(tokens_per_joule, rel=0.1)
    utilization = next(row for row in device.health.metrics if row.key == "nvml_utilization_percent")
    assert (utilization.mean, "never judged" in utilization.note) == (100, True)
    assert device.lines is not None
    lengths = {len(values) for values in device.lines.values.values()}
    assert len(lengths) == 1
    assert set(device.lines.values["power_w"]) == {500.0}
    assert fmean(device.lines.values["output_tokens_per_s"]) == pytest.approx(rate, rel=0.5)
    recording = read_recording(folder.path / "samples.jsonl")
    assert recording.end is not None
    assert recording.start.interval_s == 0.1
    assert "GPU score" in folder.report_path.read_text()
    assert result.score.not_comparable == ["the ladder was 1, 10"]
    assert set(device.sustained.utilization) == {
        "sm_active_percent",
        "tensor_percent",
        "dram_bandwidth_percent",
        "nvml_utilization_percent",
    }
    assert result.score.totals is not None
    assert result.score.totals.generations >= result.score.totals.sustained_generations > 0
    sustained = sum(each.sustained.output_tokens for each in result.score.devices if each.sustained)
    assert result.score.totals.output_tokens > sustained > 0
    assert [each.name for each in result.score.expectations] == ["utilization", "temperature", "throughput"]


@pytest.mark.slow
def test_gpu_with_errors_is_degraded(tmp_path: Path) -> None:
    changes = [*gpus()[0].changes, ReadingChange(2.5, "ecc_uncorrected", 2)]
    _, result, _ = run(tmp_path, gpus(changes=changes, refused={"clock_reasons": 4}))
    assert result.score.health == "DEGRADED"
    health = result.score.devices[0].health
    assert health is not None
    assert health.reasons[0] == "2 new ECC errors, uncorrected"
    assert any("clock reasons: unreadable" in reason for reason in health.reasons)
    check_measured(result)  # the score stands; the GPU is degraded


@pytest.mark.slow
def test_lost_gpu_is_degraded_although_its_engine_continues(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, gpus(lost_after_s=2.5))
    device = result.score.devices[0]
    assert device.health is not None
    assert (device.health.verdict, device.health.reasons[0][:16]) == ("DEGRADED", "the GPU was lost")
    assert device.sustained is not None
    assert device.sustained.power_w is None, "nothing is known beyond the last sample"


@pytest.mark.slow
def test_dead_engine_leaves_a_partial_result_without_a_score(tmp_path: Path) -> None:
    folder, result, _ = run(tmp_path, gpus(), script={"fault": "die", "after_s": 2.0})
    assert (result.verdict, result.status) == ("FAILED", "partial")
    assert result.score.output_tokens_per_s is None
    assert "exit status 7" in result.reasons[0]
    assert "the run is incomplete" in result.score.not_comparable
    assert result.score.devices[0].levels
    assert "no score" in folder.report_path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["fail_at_start", "die"])
def test_failed_gpu_stops_no_other_and_leaves_no_sum(tmp_path: Path, fault: str) -> None:
    _, result, _ = run(tmp_path, gpus(2), duration_s=3.0, script={"fault": fault, "after_s": 0.3, "only": uuid(1)})
    healthy, broken = result.score.devices
    assert (healthy.failure, broken.sustained) == (None, None)
    assert healthy.output_tokens_per_s is not None
    assert (result.verdict, result.score.output_tokens_per_s) == ("FAILED", None)
    # A busy machine adds that it read steps late.
    assert [reason for reason in result.reasons if "read " not in reason] == [f"GPU 1: {broken.failure}"]


def test_no_working_engine_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="GPU 0: 6 GiB do not hold the weights"):
        run(tmp_path, gpus(), script={"fault": "fail_at_start"})


@pytest.mark.slow
def test_cpu_result_is_not_comparable(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, None, cpu=True, script={"ready": {"dtype": "float32", "parameters": 1_929_920}})
    assert result.score.devices[0].health is None
    assert [reason.split(":")[0] for reason in result.score.not_comparable] == [
        "measured on a CPU",
        "the model has 1,929,920 parameters; Qwen3-0.6B has 596,049,920",
        "computed in float32, not bfloat16",
        "the ladder was 1, 10",
    ]
    assert result.score.tokens_per_joule is None


@pytest.mark.slow
def test_fp8_is_a_separate_workload(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, gpus(), precision="fp8", script={"ready": {"dtype": "bfloat16+fp8-weights+fp8-kv"}})
    assert result.score.workload == "gpu-score-fp8/1"
    assert not any("computed in" in reason for reason in result.score.not_comparable)
    settings = result.score.devices[0].engine_settings
    assert (settings["quantization"], settings["kv_cache_dtype"]) == ("fp8", "fp8")
    assert settings["enable_prefix_caching"] is False


@pytest.mark.slow
def test_engine_with_another_dtype_is_not_comparable(tmp_path: Path) -> None:
    _, result, _ = run(tmp_path, gpus(), precision="fp8")
    assert "computed in bfloat16, not bfloat16+fp8-weights+fp8-kv" in result.score.not_comparable


@pytest.mark.parametrize(("precision", "cpu"), [("int4", False), ("fp8", True)])
def test_unsupported_precision_is_refused(precision: str, cpu: bool) -> None:
    with pytest.raises(ConfigError, match=f"--precision.*{precision}"):
        BenchConfig(precision=precision, cpu=cpu)  # type: ignore[arg-type]


@pytest.mark.slow
def test_ratio_to_a_reference_is_in_the_result_and_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--reference b300: no such file"):
        run(tmp_path, gpus(), reference="b300")
    assert not (tmp_path / "runs").exists(), "refused before anything ran"
    monkeypatch.setattr("meltcore.measure.score.workload.LEVELS", (1, 10))
    folder, result, _ = run(tmp_path, gpus(), duration_s=2.0)
    [found] = result.score.references
    assert result.score.output_tokens_per_s is not None
    assert found.ratio == pytest.approx(result.score.output_tokens_per_s / found.output_tokens_per_s)
    assert f"{found.ratio:.2f} × NVIDIA H200 (h200" in folder.report_path.read_text()
    assert read_result(folder.path) == result


@pytest.mark.slow
def test_sweep_measures_every_cell_with_its_length_and_temperature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meltcore.measure.score.config.MIN_CELL_S", 0.1)
    grid = {"sweep_concurrency": (1, 8), "sweep_output_lens": (4, 16), "sweep_temperatures": (0.0, 0.7)}
    folder, result, lines = run(tmp_path, gpus(), duration_s=4.0, sweep=True, **grid)
    score = result.score
    assert (result.status, score.workload, score.output_tokens_per_s) == ("complete", "gpu-sweep/1", None)
    assert "a sweep has no score and ranks with nothing" in score.not_comparable
    assert score.grid is not None
    assert (score.grid.prompt_tokens, score.grid.cell_s) == (128, pytest.approx(0.475))
    [device] = score.devices
    assert [(each.concurrency, each.output_len, each.temperature) for each in device.sweep] == [
        (concurrency, length, temperature) for concurrency in (1, 8) for length in (4, 16) for temperature in (0.0, 0.7)
    ]
    assert all(each.output_tokens > 0 for each in device.sweep)
    assert all(each.prompt_tokens % 128 == 0 for each in device.sweep)
    steps = map(json.loads, (tmp_path / f"emitted.{uuid(0)}").read_text().splitlines())
    assert {1, 8} <= {len(step.get("ids", ())) for step in steps}, "one request at a time, and 8 concurrently"
    assert (device.levels, device.sustained) == ([], None)
    assert lines[1:].count("GPU 0 True") == 1
    assert read_result(folder.path) == result
    assert "temperature 0.7" in folder.report_path.read_text()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sweep_concurrency": (8, 1)}, "--sweep-concurrency must ascend without repetition; got 8,1"),
        ({"sweep_temperatures": (0.0, 0.0)}, "--sweep-temperatures must ascend without repetition; got 0,0"),
        ({"sweep_temperatures": (0.0, 0.1, 0.2, 0.3, 0.4)}, "--sweep-temperatures takes at most 4; got 5"),
        ({"duration_s": 30.0}, "--duration 30 gives each of 36 cells 0.79 s; the least is 1 s"),
        ({"reference": "h200"}, "--sweep has no score"),
    ],
)
def test_impossible_sweep_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BenchConfig(sweep=True, **settings)


@pytest.mark.slow
def test_prompts_of_a_file_are_a_workload_that_ranks_with_itself_alone(tmp_path: Path) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("What is 2 + 2?\nWhat is 3 + 4, and what is 5 + 6?\n")
    script = {"ready": {"dtype": "float32", "parameters": 1_929_920}}
    folder, result, _ = run(tmp_path, None, cpu=True, duration_s=4.0, prompts=str(file), script=script)
    score = result.score
    assert score.workload.startswith("gpu-prompts/1+")
    assert score.prompt_file is not None
    assert (score.prompt_file.prompts, score.references) == (2, [])
    assert not any("parameters" in reason for reason in score.not_comparable), "any model has a score of these prompts"
    shortest, longest = score.prompt_file.min_tokens, score.prompt_file.max_tokens
    run_of_ten = score.devices[0].sustained
    assert run_of_ten is not None
    assert shortest < run_of_ten.prompt_tokens / run_of_ten.ttft_ms.n < longest, "both prompts were sent"
    assert score.prompt_file.sha256 in folder.report_path.read_text()


@pytest.mark.slow
def test_gpus_are_selected_by_index_and_uuid_prefix(tmp_path: Path) -> None:
    part_of_it = f"MIG-5c89-{os.getpid()}"
    mig = FakeGpu(uuid=uuid(2), mig_instances={part_of_it: 1}, changes=gpus()[0].changes)
    _, result, _ = run(tmp_path, [*gpus(2), mig], gpus="1,MIG-5c")
    assert [device.uuid for device in result.score.devices] == [uuid(1), part_of_it]
    assert (tmp_path / f"emitted.{part_of_it}").exists()
    whole, part = result.score.devices
    assert whole.sustained is not None
    assert part.sustained is not None
    assert whole.sustained.tokens_per_joule is not None
    assert part.sustained.tokens_per_joule is None, "the energy counter is that of the whole GPU"
    with pytest.raises(ConfigError, match="there are GPUs 0 to 2"):
        run(tmp_path, [*gpus(2), mig], gpus="3")


@pytest.mark.slow
def test_gpu_divided_by_mig_is_measured_slice_by_slice(tmp_path: Path) -> None:
    """An engine that sees the GPU's UUID would run on one slice and be reported as the whole GPU."""
    parts = [f"MIG-{number}-{os.getpid()}" for number in (1, 2)]
    divided = FakeGpu(uuid=uuid(0), mig_instances={parts[0]: 1, parts[1]: 2}, changes=gpus()[0].changes)
    _, result, _ = run(tmp_path, [divided], duration_s=2.0)
    assert [device.uuid for device in result.score.devices] == parts
    assert [device.memory_bytes for device in result.score.devices] == [141 * GIB // 8] * 2
    assert all((tmp_path / f"emitted.{part}").exists() for part in parts)


@pytest.mark.slow
def test_only_gpus_of_cuda_visible_devices_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"1,{uuid(1)}")
    _, result, _ = run(tmp_path, gpus(2), duration_s=2.0)
    assert [device.label for device in result.score.devices] == ["GPU 1"]
    assert (tmp_path / f"emitted.{uuid(1)}").exists(), "the engine sees it by its UUID"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='-1' hides every GPU"):
        run(tmp_path / "hidden", gpus(2))
    assert not (tmp_path / "hidden" / "runs").exists(), "nothing was measured, nothing is left"


def test_gpu_of_another_bench_is_refused(tmp_path: Path) -> None:
    device = Device(name="NVIDIA H200", label="GPU 0", settings={}, uuid=uuid(0))
    with claim([device]), pytest.raises(ConfigError, match="GPU 0 is being measured by another meltcore bench"):
        run(tmp_path, gpus())
    assert not (tmp_path / "emitted").exists()
    with claim([device]):
        pass


@pytest.mark.slow
def test_memory_and_cores_in_use_by_others_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Surroundings(cores=2, is_server_local=False, other_share=0.5, steal_share=0.0)
    monkeypatch.setattr(bench_run.SurroundingsMonitor, "finish", lambda self: busy)
    _, result, _ = run(tmp_path, gpus(readings={"memory_used_bytes": 12 * GIB}), duration_s=2.0)
    assert result.score.devices[0].memory_in_use_bytes == 12 * GIB
    assert any("12 GiB of its memory were in use before the run" in note for note in result.notes)
    assert result.notes[-1] == "Other processes used 1.0 of 2 cores; limit 0.2: the score may be too low."


def test_invalid_settings_are_refused() -> None:
    for duration_s in (0.5, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"at least 1 s; got {duration_s}"):
            BenchConfig(duration_s=duration_s)
    with pytest.raises(ConfigError, match="exclude each other"):
        BenchConfig(cpu=True, gpus="0")


def command(folder: Path, *arguments: str, **script: Any) -> subprocess.Popen[str]:
    engine = msgspec.json.encode(program(folder / "emitted", **({"period_s": 0.005} | script))).decode()
    fake = msgspec.json.encode(sampler_command(gpus())).decode()
    return subprocess.Popen(
        [sys.executable, "-c", _COMMAND, engine, fake, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        start_new_session=True,
    )


@pytest.mark.slow
def test_command_prints_levels_as_they_end_and_the_score_last(tmp_path: Path) -> None:
    done = command(tmp_path, "--duration", "10")
    out, err = done.communicate(timeout=WAIT_S)
    assert (done.returncode, err) == (0, "")
    lines = [line for line in out.splitlines() if line.strip()]
    assert lines[0].startswith("gpu-score/1: Qwen3-0.6B with random weights on GPU 0 (NVIDIA H200)")
    assert lines[1].split()[:4] == ["GPU", "0", "concurrency", "1"]
    assert "HEALTHY" in out
    assert "In the sustained window: 500 W (at most 500), 45 °C" in out
    assert "output tokens/s  (gpu-score/1, Qwen/Qwen3-0.6B, bfloat16, dummy weights, engine" in lines[-2]
    assert lines[-1].startswith("report: runs/")


@pytest.mark.slow
def test_exit_status_without_a_score(tmp_path: Path) -> None:
    died = command(tmp_path, "--duration", "10", fault="die", after_s=1.0)
    out, _ = died.communicate(timeout=WAIT_S)
    assert died.returncode == 1
    assert "no score" in out
    assert "exit status 7" in out
    unready = command(tmp_path, "--duration", "10", fault="fail_at_start")
    _, err = unready.communicate(timeout=WAIT_S)
    assert (unready.returncode, err) == (2, "meltcore bench: GPU 0: 6 GiB do not hold the weights\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interruption_keeps_what_was_measured_and_ends_all_processes(tmp_path: Path, number: int) -> None:
    running = command(tmp_path, "--duration", "60", "--json")
    assert running.stderr is not None
    while "concurrency" not in running.stderr.readline():
        pass
    os.killpg(running.pid, number)
    time.sleep(0.2)
    os.killpg(running.pid, number)  # a second one has no effect
    out, _ = running.communicate(timeout=WAIT_S)
    assert running.returncode == 130
    result = msgspec.json.decode(out, type=ScoredRun)
    assert (result.status, result.verdict, result.score.output_tokens_per_s) == ("partial", "PARTIAL", None)
    assert result.score.devices[0].levels
    assert processes_of(tmp_path) == []


@pytest.mark.slow
def test_interruption_after_the_measurement_has_no_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted_assemble(*args: Any, **kwargs: Any) -> ScoredRun:
        signal.raise_signal(signal.SIGINT)
        return assemble(*args, **kwargs)

    monkeypatch.setattr("meltcore.measure.score.run.assemble", interrupted_assemble)
    folder, result, _ = run(tmp_path, gpus(), duration_s=2.0)
    check_measured(result)
    assert read_result(folder.path) == result
    assert folder.report_path.exists()


@pytest.mark.slow
def test_interruption_before_the_first_level_ends_all_processes(tmp_path: Path) -> None:
    running = command(tmp_path, "--duration", "60", fault="never_ready")
    assert running.stdout is not None
    assert running.stdout.readline().startswith("gpu-score/1")
    os.killpg(running.pid, signal.SIGINT)
    _, err = running.communicate(timeout=WAIT_S)
    assert (running.returncode, err) == (130, "meltcore bench: interrupted\n")
    assert processes_of(tmp_path) == []


def processes_of(folder: Path) -> list[str]:
    """Command lines of the scripted engines and samplers of `folder` that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if str(folder) in line]
