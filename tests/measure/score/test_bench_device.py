"""One engine behind pipes: its tokens are counted exactly, and each of its faults is a named failure."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from scripted_bench_engine import program
from waiting import WAIT_S

from meltcore.measure.documents.score import ScoreLevel
from meltcore.measure.score import engine_process
from meltcore.measure.score.device import Device, DeviceRun
from meltcore.measure.score.engine_process import EngineError, ScoredEngine
from meltcore.protocol.json_lines import Generate

FAST = 0.002


def never() -> bool:
    return False


@pytest.fixture(autouse=True)
def _scripted_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "ENGINE_COMMAND", program(tmp_path / "emitted", period_s=FAST))


def device_run(folder: Path, *, duration_s: float = 2.0, **script: Any) -> DeviceRun:
    """A run on the scripted engine; `script` replaces what it does."""
    if script:
        engine_process.ENGINE_COMMAND = program(folder / "emitted", **({"period_s": FAST} | script))
    reported: list[ScoreLevel] = []
    run = DeviceRun(
        device=Device(name="a CPU", label="CPU", settings={"model": "scripted", "max_num_seqs": 64}),
        concurrencies=(1, 10, 100),
        duration_s=duration_s,
        log_path=folder / "engine.log",
        is_interrupted=never,
        on_level=lambda device, level, last: reported.append(level),
    )
    run.reported = reported  # type: ignore[attr-defined]
    return run


def emitted(folder: Path, name: str = "cpu") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / f"emitted.{name}").read_text().splitlines()]


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_rates_equal_those_of_the_emitted_tokens(tmp_path: Path) -> None:
    with device_run(tmp_path, duration_s=8.0) as run:
        run.start()
        assert run.failure is None
        began_s = time.monotonic()
        run.run(began_s)
    assert run.failure is None
    steps = [line for line in emitted(tmp_path) if line.get("ids")]
    assert run.sustained is not None
    for level in [*run.levels, run.sustained]:
        start_s, end_s = began_s + level.start_s + level.ramp_s, began_s + level.end_s
        counted = sum(len(step["ids"]) for step in steps if start_s - 1e-6 < step["t_s"] <= end_s + 1e-6)
        first = sum(len(step["ids"]) for step in steps if abs(step["t_s"] - start_s) < 1e-6)
        assert level.output_tokens == counted - first
        assert level.output_tokens_per_s == pytest.approx(level.output_tokens / (end_s - start_s))
        assert level.itl_ms.min is not None
        assert level.itl_ms.min >= 1000 * FAST
    assert [level.concurrency for level in run.levels] == [1, 10, 100]
    assert run.reported == [*run.levels, run.sustained]  # type: ignore[attr-defined]
    assert run.sustained.concurrency == 100, "64 concurrent requests give more than 10"
    assert run.sustained.waiting > 0, "36 requests wait"
    planned_s = 8.0 * (0.04 + 0.04 + 0.06 + 0.55)  # of 8; a busy machine ends the level later, and none earlier
    assert planned_s - 0.1 <= run.sustained.end_s < 8.0
    times, tokens = run.steps()
    assert tokens.sum() >= sum(level.output_tokens for level in run.levels) + run.sustained.output_tokens
    assert (times[1:] >= times[:-1]).all()


def test_engine_gets_its_settings_and_ends_with_the_run(tmp_path: Path) -> None:
    with device_run(tmp_path) as run:
        run.start()
        assert run._process is not None
        pid = run._process.pid
    assert gone(pid)
    assert emitted(tmp_path)[0]["config"] == {"model": "scripted", "max_num_seqs": 64}
    assert run.ready_message is not None
    assert run.ready_message.version == "0.1.0+scripted"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("fail_at_start", "6 GiB do not hold the weights"),
        ("die", "ended: exit status 7\n  CUDA error: an illegal memory access"),
        ("be_killed", "ended: killed by signal 9"),
        ("stall", "gave no token for 0.6 s"),
        ("too_few", "after 1 tokens; each must give exactly 128"),
        ("too_many", "more than 128 tokens"),
        ("wrong_id", "request 999999, which was never sent"),
        ("twice", "one list of tokens for each request"),
        ("future", "after its line had come"),
        ("past", "before its request was sent"),
        ("garbage", "an invalid line"),
        ("refuse", "refused request 0: the prompt is too long"),
        ("fail", "CUDA out of memory"),
    ],
)
def test_each_fault_is_a_named_failure(
    tmp_path: Path, fault: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "stall":
        monkeypatch.setattr(engine_process, "STALL_LIMIT_S", 0.6)
    with device_run(tmp_path, fault=fault) as run:
        run.start()
        pid = run._process.pid if run._process else 0
    assert run.failure is not None
    assert message in run.failure
    assert gone(pid)


@pytest.mark.slow
def test_engine_that_dies_keeps_what_was_measured(tmp_path: Path) -> None:
    with device_run(tmp_path, duration_s=6.0, fault="die", after_s=1.5) as run:
        run.start()
        assert run.failure is None
        run.run(time.monotonic())
    assert run.failure is not None
    assert "exit status 7" in run.failure
    assert run.levels
    assert run.sustained is None


def test_interruption_ends_a_run(tmp_path: Path) -> None:
    stop_s = time.monotonic() + 1.0
    with device_run(tmp_path, duration_s=60.0) as run:
        run.is_interrupted = lambda: time.monotonic() > stop_s
        run.start()
        run.run(time.monotonic())
    assert run.failure == "interrupted"


def test_prompts_larger_than_a_pipe_are_sent_while_tokens_arrive(tmp_path: Path) -> None:
    """Neither side blocks: the pipes hold 64 KiB, the prompts are 7 MB."""
    engine_process.ENGINE_COMMAND = program(tmp_path / "emitted", period_s=0.0)
    with ScoredEngine({}, tmp_path / "log") as process:
        process.wait_ready(never)
        for number in range(2_000):
            process.send(Generate(number, [139_999] * 500, 3))
        ended: set[int] = set()
        limit_s = time.monotonic() + WAIT_S
        while len(ended) < 2_000 and time.monotonic() < limit_s:
            for step in process.steps(time.monotonic() + 1):
                ended |= {number for number, _ in step.finish_reasons}
    assert ended == set(range(2_000))


def test_idle_engine_may_send_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_process, "STALL_LIMIT_S", 0.2)
    with ScoredEngine({}, tmp_path / "log") as process:
        process.wait_ready(never)
        time.sleep(0.4)
        process.send(Generate(0, [5], 1))
        while not (steps := process.steps(time.monotonic() + 5)):
            pass
        assert steps[0].finish_reasons == [(0, "length")]


def test_engine_that_is_never_ready_is_an_error(tmp_path: Path) -> None:
    engine_process.ENGINE_COMMAND = ("sleep", "60")
    process = ScoredEngine({}, tmp_path / "log")
    try:
        with pytest.raises(EngineError, match="not ready within 0 s"):
            process.wait_ready(never, limit_s=0.2)
    finally:
        process._process.kill()
        process.stop()
