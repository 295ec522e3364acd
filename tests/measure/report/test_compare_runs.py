import json
from collections.abc import Callable
from pathlib import Path

import pytest
from sample_results import sample_level, sample_run

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import EvalScore, RunResult
from meltcore.measure.report.comparisons.compare_runs import compare_runs, environment_changes, print_ratios


def faster() -> RunResult:
    return sample_run([sample_level(10, output_tokens_per_s=500.0), sample_level(77)])


def slower() -> RunResult:
    return sample_run([sample_level(10, output_tokens_per_s=250.0)])


def test_levels_of_the_same_load_are_compared() -> None:
    rows = compare_runs(slower(), faster())
    assert {row.load for row in rows} == {"concurrency 10"}
    [speed] = [row for row in rows if row.metric == "output tok/s"]
    assert (speed.first, speed.second, speed.ratio, speed.better) == (250.0, 500.0, 2.0, "higher")


def test_what_the_sample_does_not_carry_has_no_ratio() -> None:
    [row] = [row for row in compare_runs(slower(), faster()) if row.metric == "TTFT p99 ms"]
    assert row.ratio is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"status": "partial"}, "second run is partial"),
        ({"levels": [sample_level(10, workload="random:in=8")]}, "concurrency 10 differs"),
        ({"levels": [sample_level(10, requests=999)]}, "concurrency 10 differs"),
        ({"levels": [sample_level(10, verdict="CLIENT_BOUND")]}, "not OK at concurrency 10"),
        (
            {"settings": {"debug": ["--no-async-scheduling"]}},
            "second run's server had debug switches on: --no-async-scheduling",
        ),
        ({"settings": {"weights": "dummy"}}, "the weights differ: .* against dummy"),
    ],
)
def test_unlike_and_partial_runs_are_refused_unless_forced(changes: dict[str, object], reason: str) -> None:
    other = sample_run([sample_level(10)])
    for name, value in changes.items():
        setattr(other, name, value)
    with pytest.raises(ConfigError, match=reason):
        compare_runs(slower(), other)
    assert compare_runs(slower(), other, force=True)


def test_levels_that_sent_for_the_same_time_are_compared_whatever_they_sent() -> None:
    timed = [sample_run([sample_level(10, send_s=10.0, requests=requests)]) for requests in (400, 900)]
    assert compare_runs(*timed)
    with pytest.raises(ConfigError, match="concurrency 10 differs"):
        compare_runs(timed[0], sample_run([sample_level(10, send_s=20.0, requests=400)]))


def test_scores_of_two_evaluations_are_compared() -> None:
    ours, theirs = slower(), faster()
    ours.eval_score = EvalScore(total_tokens_per_s=300.0, output_tokens_per_s=60.0)
    assert [row for row in compare_runs(ours, theirs) if row.load == "score"] == []
    theirs.eval_score = EvalScore(total_tokens_per_s=100.0, output_tokens_per_s=30.0)
    found = {row.metric: row.ratio for row in compare_runs(theirs, ours) if row.load == "score"}
    assert found == {"prompts and answers": 3.0, "answers alone": 2.0}


def test_weights_that_a_server_does_not_name_are_a_change_and_no_reason_against() -> None:
    ours, theirs = slower(), faster()
    ours.settings = {"weights": "real"}
    theirs.settings = {}
    assert compare_runs(ours, theirs)
    assert ("weights", "real", "not named") in environment_changes(ours, theirs)


def test_runs_without_a_common_level_are_refused_even_when_forced() -> None:
    with pytest.raises(ConfigError, match="no level in common"):
        compare_runs(slower(), sample_run([sample_level(20)]), force=True)


def test_what_changed_around_the_runs_is_named() -> None:
    other = faster()
    other.fingerprint.versions = {**other.fingerprint.versions, "torch": "2.12.0"}
    assert environment_changes(slower(), other) == [("torch", "2.11.0", "2.12.0")]


def test_verb_prints_ratios_and_no_claim(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [RunFolder.create(tmp_path, "load") for _ in range(2)]
    for folder, result in zip(folders, (slower(), faster()), strict=True):
        folder.write_result(result)
    paths = [str(folder.path) for folder in folders]
    assert main(["compare", *paths]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2.000" in printed
    assert "no evidence of a difference" in printed
    assert main(["compare", *paths, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["ratio"] == 2.0


@pytest.mark.parametrize(
    ("runs", "printed"), [((slower, faster), "\x1b[32m2.000"), ((faster, slower), "\x1b[31m0.500")]
)
def test_ratios_are_green_where_the_second_run_is_better(
    runs: tuple[Callable[[], RunResult], ...],
    printed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in {"FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    print_ratios(compare_runs(*(run() for run in runs)), [], [])
    assert printed in capsys.readouterr().out
