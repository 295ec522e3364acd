"""The gates of the demo, one by one."""

import pytest

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.schema import CheckResult, Evaluation, FleetLevel, LevelResult, StreamLoad
from meltcore.measure.experiments.demo.config import DemoConfig
from meltcore.measure.experiments.demo.verdict import judge, passed

GOOD_CHECKS = [CheckResult(name="health", status="PASS")]


def evaluation(right: int = 199, failed: int = 0) -> Evaluation:
    return Evaluation(total=200, correct=right, failed=failed, ci_low=0.0, ci_high=1.0)


def level(**changes: object) -> LevelResult:
    fields: dict[str, object] = {
        "concurrency": 100,
        "requests": 200,
        "succeeded": 200,
        "failed": 0,
        "peak_in_flight": 100,
        "accuracy": 0.995,
        "duration_s": 1.0,
        "output_tokens_per_s": 1.0,
        "total_tokens_per_s": 1.0,
        "prompt_tokens": 1,
        "output_tokens": 1,
    }
    return LevelResult(**(fields | changes))  # type: ignore[arg-type]


def mixed(connections: int = 100, peak: int = 100, refused: int = 0, **changes: object) -> FleetLevel:
    load = StreamLoad(name="sums", model="sums", level=level(**changes), refused=refused, refusals=refused)
    return FleetLevel(
        part="mixed",
        label=f"mixed, {connections:,} connections",
        connections=connections,
        send_s=3.0,
        duration_s=3.0,
        peak_in_flight=peak,
        streams=[load],
        released_s=0.0,
    )


def test_clean_run_passes_without_reasons() -> None:
    assert judge(GOOD_CHECKS, evaluation(), [], [mixed()], [100]) == ("OK", [])


@pytest.mark.parametrize("accuracy", [0.985, 1.0])
def test_difference_of_exactly_one_point_passes(accuracy: float) -> None:
    verdict, _ = judge(GOOD_CHECKS, evaluation(), [], [mixed(accuracy=accuracy)], [100])
    assert verdict == "OK"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"succeeded": 199, "failed": 1}, "199 of 200 requests got their complete answer"),
        ({"accuracy": 0.9849}, "more than one point from the unloaded 99.50 %"),
        ({"accuracy": None}, "accuracy was not measured"),
        ({"peak": 99}, "mixed, 100 connections: only 99 were in flight together"),
        ({"verdict": "FAILED", "reasons": ["odd"]}, "FAILED: odd"),
    ],
)
def test_level_fails_with_its_reason(changes: dict[str, object], reason: str) -> None:
    verdict, reasons = judge(GOOD_CHECKS, evaluation(), [], [mixed(**changes)], [100])
    assert verdict == "FAILED"
    assert any(reason in line for line in reasons), reasons


@pytest.mark.parametrize(
    ("found", "reason"),
    [(evaluation(right=189), "unloaded accuracy is 94.50 %; the limit is 95 %"), (evaluation(failed=1), "1 of 200")],
)
def test_unloaded_answers_must_be_complete_and_right(found: Evaluation, reason: str) -> None:
    verdict, reasons = judge(GOOD_CHECKS, found, [], [mixed(accuracy=found.accuracy)], [100])
    assert verdict == "FAILED"
    assert reason in reasons[0]


def test_failed_api_check_fails_the_run() -> None:
    broken = CheckResult(name="health", status="FAIL", detail="status is 500")
    verdict, reasons = judge([broken], evaluation(), [], [mixed()], [100])
    assert (verdict, reasons) == ("FAILED", ["API check failed: health: status is 500"])


def test_missing_level_fails_the_run() -> None:
    verdict, reasons = judge(GOOD_CHECKS, evaluation(), [], [mixed()], [100, 10_000])
    assert (verdict, reasons) == ("FAILED", ["levels not run: 10,000"])


def test_client_at_its_limit_passes_as_client_bound() -> None:
    verdict, reasons = judge(GOOD_CHECKS, evaluation(), [], [mixed(verdict="CLIENT_BOUND", reasons=["late"])], [100])
    assert (verdict, reasons) == ("CLIENT_BOUND", [])
    assert passed(verdict)


def test_dead_server_has_its_own_verdict() -> None:
    dead = mixed(verdict="SERVER_DIED", reasons=["gone at 3 s"], succeeded=10, failed=190)
    verdict, _ = judge(GOOD_CHECKS, evaluation(), [], [dead], [100])
    assert verdict == "SERVER_DIED"
    assert not passed(verdict)


@pytest.mark.parametrize("levels", [(), (0,), (10, -1), (10, 10)])
def test_invalid_levels_are_refused(levels: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="levels"):
        DemoConfig(levels=levels)


def test_levels_other_than_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--levels", "ten"])
    assert "'ten' is not a whole number" in capsys.readouterr().err


def test_refused_requests_were_connected_too() -> None:
    assert judge(GOOD_CHECKS, evaluation(), [], [mixed(peak=90, refused=10)], [100]) == ("OK", [])
    verdict, _ = judge(GOOD_CHECKS, evaluation(), [], [mixed(peak=90, refused=9)], [100])
    assert verdict == "FAILED"


def test_accuracy_of_small_levels_counts_together() -> None:
    few = {"requests": 100, "succeeded": 100, "accuracy": 0.98}
    assert judge(GOOD_CHECKS, evaluation(), [], [mixed(**few), mixed(accuracy=1.0)], [100]) == ("OK", [])
    _, reasons = judge(GOOD_CHECKS, evaluation(), [], [mixed(**few), mixed(**few)], [100])
    assert reasons == ["mixed levels: accuracy 98 % is more than one point from the unloaded 99.50 %"]
