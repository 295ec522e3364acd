"""Result files: one per script and machine, the newest row of each work, targets with what they bound."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, Literal

import bench_output
import performance_tables
import pytest
from bench_output import Row, Target, machine_name, median_rows, merge_run

RESULTS = sorted(bench_output.RESULTS.glob("*/*.json"))
# A report card has runs too, but those of commands.
RUNS = [
    path
    for path in RESULTS
    if "runs" in (found := json.loads(path.read_text())) and not {"tier", "document"} & set(found)
]
SCRIPTS = {path.stem for path in Path(bench_output.__file__).parent.glob("*.py")}


def run_of(subject: str, *rows: tuple[str, float]) -> dict[str, Any]:
    return {"subject": subject, "rows": [{"work": work, "unit": "s", "value": value} for work, value in rows]}


def test_newer_row_replaces_the_older_one_of_the_same_subject(tmp_path: Path) -> None:
    path = tmp_path / "script" / "h200.json"
    for run in (run_of("a", ("w", 1), ("v", 2)), run_of("b", ("w", 3)), run_of("a", ("w", 4)), run_of("b", ("w", 5))):
        merge_run(path, run)
    assert json.loads(path.read_text())["runs"] == [run_of("a", ("v", 2)), run_of("a", ("w", 4)), run_of("b", ("w", 5))]


@pytest.mark.parametrize(
    ("target", "met"),
    [
        (Target(10), True),
        (Target(13), False),
        (Target(13, better="lower"), True),
        (Target(10, better="lower"), False),
        (Target(1.5, of="ratio"), True),
        (Target(2.5, of="ratio"), False),
        (None, None),
    ],
)
def test_target_is_met_by_what_it_bounds(target: Target | None, met: bool | None) -> None:
    row = Row(work="w", unit="tokens/s", value=12.0, ratio=2.0, target=target)
    assert row.met is met
    found = row.as_json()
    assert found.get("met") is met
    if target is not None:
        assert (found["reach"], found["reach_of"], found["better"]) == target


def test_ratio_without_a_peer_and_an_invalid_value_meet_nothing() -> None:
    assert "met" not in Row(work="w", unit="s", value=1.0, target=Target(1.0, of="ratio")).as_json()
    assert Row(work="w", unit="s", value=2.0, target=Target(1.0), invalid="why").as_json()["met"] is False


def test_repeats_give_the_median_and_the_worst_of_them_meets_the_target() -> None:
    def runs(*values: float, better: Literal["higher", "lower"] = "lower") -> list[list[Row]]:
        target = Target(5.0, better=better)
        return [
            [Row(work="w", unit="s", value=value, target=target), Row(work="v", unit="us", value=-value)]
            for value in values
        ]

    row, other = median_rows(runs(4.0, 5.3, 1.0))
    assert row.as_json() == {
        "work": "w",
        "unit": "s",
        "value": 4.0,
        "repeats": 3,
        "lowest": 1.0,
        "highest": 5.3,
        "reach": 5.0,
        "reach_of": "value",
        "better": "lower",
        "met": False,
    }
    assert (other.value, other.span, other.met) == (-4.0, (-5.3, -1.0), None)
    assert [median_rows(runs(*values))[0].met for values in ((4.0, 5.0), (6.0, 4.0))] == [True, False]
    assert [median_rows(runs(*values, better="higher"))[0].met for values in ((5.0, 6.0), (6.0, 4.0))] == [True, False]
    assert "repeats" not in median_rows(runs(4.0))[0].as_json()
    assert table_of([row.as_json()])[2] == "| w | 4 (1 to 5.3) | s | ≤ 5, not met |"


def table_of(rows: list[dict[str, Any]], code: str = "") -> list[str]:
    """Lines of the table of one run of the load client's cost."""
    run = {"rows": rows, "versions": {}, "date": "today", "commit": "c0ffee", "command": "c", "code": code}
    return performance_tables.run_table("client_cost", run | {"machine": {"gpus": [], "cores": 2}}, re.compile("w"))


def test_table_says_which_rows_are_older_than_their_code_or_have_no_spread() -> None:
    row = {"work": "w", "unit": "s", "value": 1.0}
    today = bench_output.code_digest("client_cost")
    made = "today, commit c0ffee, CPU, 2 cores: `c`"
    assert table_of([row])[-2] == f"{made}. The code has changed since. No spread was recorded."
    assert table_of([row], today)[-2] == f"{made}. No spread was recorded."
    assert table_of([row | {"repeats": 3, "lowest": 0.9, "highest": 1.1}], today)[-2] == made


def test_digest_of_code_changes_with_the_files_that_a_script_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_output, "SOURCE", tmp_path)
    digest = bench_output.code_digest.__wrapped__
    for name in ("serve", "measure/load"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.py").write_text("1")
    before = digest("client_cost")
    (tmp_path / "serve" / "a.py").write_text("2")
    (tmp_path / "measure" / "load" / "notes.txt").write_text("3")
    assert digest("client_cost") == before
    (tmp_path / "measure" / "load" / "a.py").write_text("2")
    assert digest("client_cost") != before


def test_code_of_every_script_is_there() -> None:
    assert SCRIPTS | {"fleet_load"} >= set(bench_output.CODE_PATHS)
    places = {name for paths in bench_output.CODE_PATHS.values() for name in paths}
    assert [name for name in sorted(places) if not (bench_output.SOURCE / name).exists()] == []


def test_files_are_named_after_the_gpus_that_were_used() -> None:
    assert machine_name([]) == "cpu"
    assert machine_name(["NVIDIA H200"] * 8, 8) == "h200-x8"
    assert machine_name(["NVIDIA H100 80GB HBM3"] * 2) == "h100-80gb-hbm3"
    assert machine_name(["NVIDIA H200"], 0) == "cpu"


def test_writing_a_result_merges_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_output, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["router.py"])
    for value in (1.0, 2.0):
        path = bench_output.write_result([Row(work="w", unit="us", value=value)], {"torch": "2"}, gpus=0)
    assert path == tmp_path / "router" / "cpu.json"
    [run] = json.loads(path.read_text())["runs"]
    assert run["rows"] == [{"work": "w", "unit": "us", "value": 2.0}]
    assert run["command"] == "python benchmarks/router.py"
    assert (run["code"], len(run["commit"]) >= 7) == (bench_output.code_digest("router"), True)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_committed_results_say_what_each_target_bounds(path: Path) -> None:
    assert path.parent.name in SCRIPTS | {"fleet_load"}, "fleet_load has rows of `meltcore load --fleet`"
    runs = json.loads(path.read_text())["runs"]
    measured = [run for run in runs if any("value" in row for row in run["rows"])]  # not peers, which have rates
    unnamed = [run["command"] for run in measured if not re.fullmatch(r"[0-9a-f]{8}", run["commit"])]
    assert unnamed == [], "measured outside of a repository: write the commit by hand"
    keys = [{(run["subject"], row["work"], row.get("unit")) for row in run["rows"]} for run in runs]
    assert len(set().union(*keys)) == sum(map(len, keys)), "an older run holds rows that a newer one replaces"
    for row in (row for run in runs for row in run["rows"]):
        if "reach" not in row:
            continue
        worst = row.get("lowest" if row["better"] == "higher" else "highest", row["value"])  # of repeats
        measured = worst if row["reach_of"] == "value" else row.get("ratio")
        if measured is not None:
            reached = measured >= row["reach"] if row["better"] == "higher" else measured <= row["reach"]
            assert row["met"] == (reached and "invalid" not in row)
