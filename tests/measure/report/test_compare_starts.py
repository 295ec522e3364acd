import json
from pathlib import Path

import msgspec
import pytest
from sample_results import sample_level, sample_run

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.comparison import ComparisonResult, StartSet, read_start_set, write_start_set
from meltcore.measure.documents.runfolder import RunFolder
from meltcore.measure.documents.schema import RunResult
from meltcore.measure.documents.verdicts import MEANINGS
from meltcore.measure.report.comparisons.compare_starts import NOT_INTERLEAVED, compare_starts
from meltcore.measure.report.comparisons.comparison import comparison_markdown
from meltcore.measure.report.render import render

SPREAD = (0.0, 0.004, -0.004, 0.002, -0.002, 0.006)


def start(rate: float, **changes: object) -> RunResult:
    return sample_run(
        [sample_level(1, output_tokens_per_s=rate / 10), sample_level(32, output_tokens_per_s=rate)], **changes
    )


def a_set(rate: float, name: str = "set", starts: int = 6, **changes: object) -> StartSet:
    runs = [start(rate * (1 + spread), **changes) for spread in SPREAD[:starts]]
    load = {"workload": "problems:short", "seed": 0}
    return StartSet(name=name, command="serve --port {port}", taken="2026-11-21T12:00:00Z", load=load, starts=runs)


def slower() -> ComparisonResult:
    return compare_starts(a_set(1000, "A"), a_set(900, "B"), control=a_set(1001), order="ABBAABBAABBA")


def test_slower_server_is_a_regression_and_a_faster_one_an_improvement() -> None:
    assert slower().verdict == "REGRESSION"
    assert compare_starts(a_set(900), a_set(1000)).verdict == "IMPROVEMENT"
    assert compare_starts(a_set(1000), a_set(1001)).verdict == "NO EVIDENCE"


def test_verdict_is_of_one_metric_on_the_highest_load_unless_told() -> None:
    found = compare_starts(a_set(1000), a_set(900))
    assert found.primary.name == "output tok/s, concurrency 32"
    assert compare_starts(a_set(1000), a_set(900), load=1).primary.name == "output tok/s, concurrency 1"
    by_latency = compare_starts(a_set(1000), a_set(900), metric="ttft p50")
    assert (by_latency.primary.metric, by_latency.verdict) == ("TTFT p50 ms", "NO EVIDENCE")
    assert len(found.rows) > 8


def test_effect_within_what_a_shows_against_itself_gets_no_verdict() -> None:
    found = compare_starts(a_set(1000), a_set(950), control=a_set(1100), order="ABBAABBAABBA")
    assert found.verdict == "NO EVIDENCE"
    assert found.noise == pytest.approx(1 - 1000 / 1100, abs=1e-9)
    assert any("machine itself moved" in caution for caution in found.cautions)


def test_stored_sets_say_that_they_are_not_interleaved() -> None:
    found = compare_starts(a_set(1000), a_set(900))
    assert found.order == ""
    assert NOT_INTERLEAVED in found.cautions
    assert NOT_INTERLEAVED not in slower().cautions


def test_unlike_environments_are_listed_before_the_numbers() -> None:
    other = a_set(900)
    for run in other.starts:
        run.fingerprint.versions = {**run.fingerprint.versions, "torch": "2.12.0"}
    text = comparison_markdown(compare_starts(a_set(1000), other))
    assert text.index("different: torch: 2.11.0 → 2.12.0") < text.index("| load | metric |")


def test_what_the_servers_say_of_themselves_is_listed_where_it_differs() -> None:
    one, other = a_set(1000, settings={"dtype": "bfloat16"}), a_set(900, settings={"dtype": "float16"})
    assert [(each.name, each.old, each.new) for each in compare_starts(one, other).differences] == [
        ("server's dtype", "bfloat16", "float16")
    ]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (a_set(900, status="partial"), "second run is partial"),
        (a_set(900, settings={"debug": ["--no-async-scheduling"]}), "debug switches"),
        (
            msgspec.structs.replace(a_set(900), load={"workload": "problems:short", "seed": 7}),
            "seed differs: 0 against 7",
        ),
    ],
)
def test_sets_that_measured_unlike_things_are_refused_unless_forced(other: StartSet, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compare_starts(a_set(1000), other)
    assert any(reason in doubt for doubt in compare_starts(a_set(1000), other, force=True).doubts)


def test_bad_start_anywhere_in_a_set_is_found() -> None:
    other = a_set(900)
    other.starts[4].levels[1].verdict = "CLIENT_BOUND"
    with pytest.raises(ConfigError, match="not OK at concurrency 32"):
        compare_starts(a_set(1000), other)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"metric": "beauty"}, "no metric 'beauty'"), ({"load": 7}, "no level in common at concurrency 7")],
)
def test_what_was_not_measured_cannot_be_judged(settings: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        compare_starts(a_set(1000), a_set(900), **settings)  # type: ignore[arg-type]


def test_markdown_shows_the_verdict_first_and_folds_the_unjudged_away() -> None:
    text = comparison_markdown(slower())
    assert text.startswith("### REGRESSION: output tok/s, concurrency 32: 1,001 -> 901 (-10.0 %).")
    assert "in the order ABBAABBAABBA; A against A: -0.1 %" in text
    shown, folded = text.split("<details>")
    assert "| concurrency 32 | output tok/s |" in shown
    assert "| concurrency 1 | output tok/s |" in folded


def test_page_shows_verdict_and_a_dot_for_each_start_and_fetches_nothing() -> None:
    page = render(slower())
    assert '<p class="badge bad">REGRESSION</p>' in page
    assert page.count("<circle") == 18
    assert "<script" not in page
    assert "http" not in page


def test_set_comes_back_from_its_file_as_it_went(tmp_path: Path) -> None:
    write_start_set(tmp_path / "A", a_set(1000))
    assert read_start_set(tmp_path / "A") == a_set(1000)
    (tmp_path / "A" / "set.json").write_text(json.dumps({"starts": 3}))
    with pytest.raises(ConfigError, match="is not a meltcore document"):
        read_start_set(tmp_path / "A")


@pytest.mark.parametrize(("rate", "starts", "code"), [(1001.0, 6, 0), (1100.0, 6, 0), (900.0, 6, 1), (900.0, 3, 3)])
def test_exit_status_tells_ci_the_verdict(
    rate: float, starts: int, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_start_set(tmp_path / "main", a_set(1000, "main"))
    write_start_set(tmp_path / "other", a_set(rate, "other", starts))
    arguments = ["compare", "main", str(tmp_path / "other"), "--baselines", str(tmp_path)]
    assert main([*arguments, "--json"]) == code
    found = msgspec.json.decode(capsys.readouterr().out, type=ComparisonResult)
    assert MEANINGS[found.verdict].exit_code == code
    assert main([*arguments, "--page", str(tmp_path / "page.html")]) == code
    assert "not interleaved" in " ".join(capsys.readouterr().out.split())
    assert (tmp_path / "page.html").exists()


def test_single_run_against_a_set_is_underpowered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_start_set(tmp_path / "main", a_set(1000, "main"))
    folder = RunFolder.create(tmp_path, "load")
    folder.write_result(start(500))
    assert main(["compare", str(tmp_path / "main"), str(folder.path), "--markdown"]) == 3
    assert "### UNDERPOWERED" in capsys.readouterr().out
