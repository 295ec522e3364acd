"""GPU readings under the latencies of a load run: same clock, same axis, gaps shown as gaps."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import FakeGpu, ReadingChange, cli_command
from hardware_tools import INTERVAL_S, sample
from scripted_server import COMMAND
from waiting import WAIT_S

from meltcore.cli.main import main
from meltcore.common.gpus.driver import NoDriverError
from meltcore.common.gpus.metrics import NOT_APPLICABLE, UNKNOWN
from meltcore.common.gpus.select import GpuInfo
from meltcore.measure.documents.fingerprint import take_fingerprint
from meltcore.measure.documents.runfolder import read_result
from meltcore.measure.documents.schema import Distribution, FleetLevel, FleetLoad, LevelResult, TimelinePoint
from meltcore.measure.node.monitor.recording import (
    Recording,
    RecordingEnd,
    RecordingStart,
    attach_gpu_means,
    attach_gpu_timelines,
    mean_sm_activity,
    timeline,
)
from meltcore.measure.report.load.levels import timeline_figure


def recording(samples: list, gpus: int = 1, end: RecordingEnd | None = None) -> Recording:  # type: ignore[type-arg]
    infos = [GpuInfo(index=index, name="NVIDIA H200", uuid=f"GPU-{index}", architecture=9) for index in range(gpus)]
    start = RecordingStart(t_s=0.0, started="2026-11-21T12:00:00Z", interval_s=INTERVAL_S, driver="580", gpus=infos)
    return Recording(start=start, samples=samples, end=end)


def level(released_s: float = 1.0, duration_s: float = 2.0) -> LevelResult:
    return LevelResult(
        concurrency=4,
        requests=4,
        succeeded=4,
        failed=0,
        peak_in_flight=4,
        duration_s=duration_s,
        output_tokens_per_s=1.0,
        total_tokens_per_s=1.0,
        prompt_tokens=1,
        output_tokens=1,
        itl_ms=Distribution(),
        released_s=released_s,
        timeline=[
            TimelinePoint(t_s=float(at), output_tokens_per_s=9.0, in_flight=4, ttft_ms=20.0, itl_ms=None if at else 5.0)
            for at in range(int(duration_s))
        ],
    )


def test_level_gets_samples_of_its_time_only() -> None:
    samples = [sample(index, {"power_w": 100.0 if index < 20 else 700.0}) for index in range(40)]
    first, second = level(1.0, 1.0), level(2.0, 1.0)
    assert (
        attach_gpu_timelines(
            [first, second], recording(samples, end=RecordingEnd(t_s=4.0, missed=0, cpu_s=0.1, reason="stopped"))
        )
        == []
    )
    assert set(first.gpus[0].values["power_w"]) == {100.0}
    assert set(second.gpus[0].values["power_w"]) == {700.0}


def test_level_of_a_fleet_gets_the_means_of_its_time_of_sending() -> None:
    """Not those of the answers that come after it."""
    samples = [sample(index, {"power_w": 100.0 if index < 20 else 700.0}) for index in range(40)]
    fields: dict[str, Any] = {"part": "mixed", "label": "", "connections": 1, "peak_in_flight": 1, "streams": []}
    ladder = [FleetLevel(send_s=0.95, duration_s=3.0, released_s=at_s, **fields) for at_s in (1.0, 2.0)]
    result = FleetLoad(status="complete", started="", duration_s=4.0, fingerprint=take_fingerprint(), settings={},
                       models=[], levels=ladder)  # fmt: skip
    attach_gpu_means(result, recording(samples, gpus=2))
    powers = [[gpu.means.get("power_w") for gpu in each.gpus] for each in ladder]
    assert powers == [[100.0, None], [700.0, None]]
    assert "was cut short" in result.gpu_note


def test_bucket_is_mean_of_its_samples_and_gap_is_none() -> None:
    samples = [sample(index, {"power_w": 100.0 + 10 * (index % 2)}) for index in range(30) if not 10 <= index < 14]
    found = timeline(recording(samples), 0, 0.0, 3.0)
    assert found.bucket_s == pytest.approx(2 * INTERVAL_S)
    line = found.values["power_w"]
    assert len(line) == 15
    assert line[5] is None
    assert line[0] == 105.0


def test_metric_without_numbers_is_listed_as_absent() -> None:
    samples = [sample(index, {"sm_active_percent": UNKNOWN, "power_w": NOT_APPLICABLE}) for index in range(10)]
    found = timeline(recording(samples), 0, 0.0, 1.0)
    assert found.absent == {"sm_active_percent": UNKNOWN, "power_w": NOT_APPLICABLE}
    assert "power_w" not in found.values


@pytest.mark.parametrize(
    ("end", "says"),
    [(None, "cut short"), (RecordingEnd(t_s=9.0, missed=3, cpu_s=0.1, reason="stopped"), "missed 3 intervals")],
)
def test_recording_with_gaps_gives_a_note(end: RecordingEnd | None, says: str) -> None:
    [note] = attach_gpu_timelines([level()], recording([sample(index) for index in range(30)], end=end))
    assert says in note


def drawn(one: LevelResult) -> str:
    figure = timeline_figure(one)
    assert figure is not None
    return str(figure.chart)


def test_drawing_has_one_axis_and_breaks_at_unknown_values() -> None:
    one = level(0.0, 6.0)
    assert drawn(one).count('class="axis"') == 3
    attach_gpu_timelines([one], recording([sample(index, gpu=gpu) for index in range(60) for gpu in (0, 1)], gpus=2))
    picture = drawn(one)
    for name in ("mean TTFT, ms", "mean ITL, ms", "SM active, %", "power, W", "memory used, GiB"):
        assert name in picture
    assert picture.count("line thin c2") == 1 + 4  # in flight, and the second GPU in each of its panels


def test_mean_sm_activity_uses_readable_samples_of_the_time() -> None:
    values = [10.0, 50.0, 70.0, UNKNOWN, 10.0]
    samples = [sample(index, {"sm_active_percent": value}) for index, value in enumerate(values)]
    assert mean_sm_activity(samples, 0.05, 0.35) == pytest.approx(0.6)
    assert mean_sm_activity(samples, 0.25, 0.35) is None


def test_monitor_without_driver_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(setup: object) -> None:
        raise NoDriverError("no NVIDIA driver here")

    monkeypatch.setattr("meltcore.measure.node.monitor.sampler.Monitor", refuse)
    assert main(["load", "http://127.0.0.1:9", "--monitor", "--out", str(tmp_path)]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert main(["load", "http://127.0.0.1:9", "--gpu", "0", "--out", str(tmp_path)]) == 2


@pytest.mark.slow
def test_load_monitor_writes_samples_timelines_and_report(tmp_path: Path) -> None:
    serve = [*COMMAND, "--port", "0", "--itl-ms", "20", "--tokens", "60"]
    server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[-1]
        gpu = FakeGpu(changes=[ReadingChange(after_s=2.0, key="power_w", value=650.0)])
        arguments = [
            "--concurrency",
            "4",
            "--num-prompts",
            "8",
            "--num-warmups",
            "0",
            "--monitor",
            "--out",
            str(tmp_path),
        ]
        done = subprocess.run(
            cli_command([gpu], "load", url, *arguments), capture_output=True, text=True, timeout=WAIT_S, check=False
        )
    finally:
        server.kill()
        server.wait(WAIT_S)
    assert done.returncode == 0, done.stderr
    [folder] = tmp_path.iterdir()
    assert (folder / "gpus.jsonl").stat().st_size > 1000
    [found] = read_result(folder).levels
    powers = [power for power in found.gpus[0].values["power_w"] if power is not None]  # a second may lack a sample
    assert powers[-2:] == [650.0, 650.0]
    assert found.timeline[1].itl_ms is not None
    assert found.timeline[1].itl_ms > 0.75 * 20
    assert "SM active, %" in (folder / "report.html").read_text()
