"""Ranking: best first, unlike results refused, forced ones marked."""

import json
from pathlib import Path

import msgspec
import pytest
from sample_certificates import certificate
from sample_results import sample_run
from sample_scores import sample_device, sample_health, sample_scored_run

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.score import ScoredRun
from meltcore.measure.documents.values.scores import NamedScore, read_score
from meltcore.measure.report.page.html import render_html
from meltcore.measure.report.scores.leaderboard import (
    FORCED_WARNING,
    leaderboard_notes,
    leaderboard_page,
    newest_runs_and_references,
    ranking_notes,
    sort_by_score,
)


def entry(name: str, peak: float = 30_000.0, **changes: object) -> NamedScore:
    return NamedScore(name, sample_scored_run([sample_device(peak)], **changes))


def written(folder: Path, name: str, result: object) -> str:
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(result))
    return str(path)


def test_results_stand_best_first() -> None:
    order = sort_by_score([entry("slow", 9_000), entry("fast", 32_000), entry("middle", 20_000)])
    assert [each.name for each in order] == ["fast", "middle", "slow"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"workload": "gpu-score/2"}, r"workload versions differ: gpu-score/1 \(a\), gpu-score/2 \(b\)"),
        ({"engine": "0.2.0+00000000"}, "engine versions differ"),
        ({"dtype": "float16"}, "precisions differ"),
        ({"weights": "real"}, "weights differ"),
        ({"model": "Qwen/Qwen3-4B"}, "models differ"),
        ({"not_comparable": ["measured on a CPU"]}, "b: measured on a CPU"),
    ],
)
def test_unlike_results_are_refused_unless_forced(changes: dict[str, object], told: str) -> None:
    entries = [entry("a"), entry("b", **changes)]
    with pytest.raises(ConfigError, match=told):
        sort_by_score(entries)
    assert len(sort_by_score(entries, force=True)) == 2


def test_folder_of_the_same_name_is_the_same_model() -> None:
    assert ranking_notes([entry("a", weights="real"), entry("b", weights="real", model="qwen3-0.6b")]) == []


def test_forced_chart_is_marked_in_words_and_in_every_drawing() -> None:
    entries = [entry("a"), entry("b", weights="real")]
    html = render_html(leaderboard_page(sort_by_score(entries, force=True), ranking_notes(entries), []))
    drawings = html.split("<svg")[1:]
    assert len(drawings) == 2
    assert all(FORCED_WARNING in drawing.split("</svg>")[0] for drawing in drawings)
    assert "the weights differ: dummy (a), real (b)" in html
    like = [entry("a"), entry("b", 20_000)]
    assert "FORCED" not in render_html(leaderboard_page(like, ranking_notes(like), []))


def test_what_may_explain_a_difference_is_said_and_forbids_nothing() -> None:
    short = entry("short", duration_s=60.0)
    short.run.fingerprint.versions["torch"] = "2.12.0"
    hot = NamedScore("hot", sample_scored_run([sample_device(health=sample_health(verdict="DEGRADED"))]))
    late = entry("late")
    late.run.verdict = "CLIENT_BOUND"
    node = NamedScore("node", sample_scored_run([sample_device(), sample_device(memory_in_use_bytes=12 * 2**30)]))
    entries = [entry("long"), short, hot, late, node]
    assert ranking_notes(entries) == []
    told = "\n".join(leaderboard_notes(entries))
    for part in (
        "1 min 0 s (short)",
        "torch was not the same: 2.11.0, 2.12.0",
        "their numbers differ: 1 (long, short, hot, late), 2 (node)",
        "hot: a GPU was DEGRADED",
        "late: the",
        "node: other programs held memory",
    ):
        assert part in told
    assert leaderboard_notes([entry("a"), entry("b")]) == []


def test_result_without_a_score_has_no_place() -> None:
    broken = sample_scored_run([sample_device(sustained=None)], not_comparable=["the run did not get to its end"])
    assert [each.name for each in sort_by_score([entry("a"), NamedScore("b", broken)], force=True)] == ["a"]
    with pytest.raises(ConfigError, match="none of these results has a score"):
        sort_by_score([NamedScore("b", broken)], force=True)


def test_eight_gpus_are_named_once() -> None:
    eight = NamedScore("a", sample_scored_run([sample_device(label=f"GPU {n}") for n in range(8)]))
    assert eight.hardware == "8 × NVIDIA H200"
    mixed = NamedScore("b", sample_scored_run([sample_device(), sample_device(name="NVIDIA L4")]))
    assert mixed.hardware == "NVIDIA H200 + NVIDIA L4"


def test_files_and_run_folders_are_read_and_other_results_refused(tmp_path: Path) -> None:
    assert read_score(written(tmp_path, "h200", sample_scored_run())).name == "h200"
    folder = tmp_path / "20261121T120000Z-bench"
    folder.mkdir()
    written(folder, "result", sample_scored_run())
    for path in (folder, folder / "result.json"):
        found = read_score(str(path))
        assert found.name == folder.name
        assert isinstance(found.run, ScoredRun)
    with pytest.raises(ConfigError, match="holds a run, not a score"):
        read_score(written(tmp_path, "demo", sample_run()))
    with pytest.raises(ConfigError, match="holds a certificate, not a score"):
        read_score(written(tmp_path, "certificate", certificate(tmp_path, gpus=1)))


def test_folder_without_a_result_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no result\.json: a run that ended before it could write one"):
        read_score(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "not valid JSON"),
        ('{"schema_version": 1, "comm', "not valid JSON"),
        ("[]", "not a meltcore document"),
        ('{"schema_version": 1, "command": "bench"}', "not a meltcore document"),
        ('{"document": "score", "schema_version": 2}', "breaks the schema of a score"),
        ('{"document": "score", "schema_version": 99}', "schema version 99"),
        (None, "No such file"),
    ],
)
def test_file_that_is_no_score_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, told: str
) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    assert main(["leaderboard", str(path), "--output", str(tmp_path / "leaderboard.html")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("meltcore leaderboard: ")
    assert "mine.json" in shown
    assert told in shown
    assert shown.count("\n") == 1


def test_command_writes_the_page_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, name, entry(name, peak).run) for name, peak in (("slow", 9e3), ("fast", 3e4))]
    page = tmp_path / "leaderboard.html"
    assert main(["leaderboard", *files, "--output", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("fast") < shown.index("slow")
    assert "30,000" in shown
    assert page.read_text().index(">fast<") < page.read_text().index(">slow<")
    assert main(["leaderboard", *files, "--output", str(page), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["fast", "slow"]


def test_page_replaces_no_file_of_another_kind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`plan --html fleet.yaml` replaced the fleet, and `compare --page` a result."""
    file = written(tmp_path, "mine", entry("mine").run)
    before = Path(file).read_text()
    assert main(["leaderboard", file, "--output", file]) == 2
    assert "exists and begins with b'{" in (told := capsys.readouterr().err)
    assert "; only a page of meltcore is replaced" in told
    assert Path(file).read_text() == before
    (tmp_path / "empty").touch()
    assert main(["leaderboard", file, "--output", str(tmp_path / "empty")]) == 0


def test_command_refuses_unlike_results_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, "a", entry("a").run), written(tmp_path, "b", entry("b", weights="real").run)]
    page = tmp_path / "leaderboard.html"
    assert main(["leaderboard", *files, "--output", str(page)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("meltcore leaderboard: these results do not rank: the weights differ: dummy (a), real (b)")
    assert not page.exists()
    assert main(["leaderboard", *files, "--output", str(tmp_path / "no" / "leaderboard.html"), "--force"]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["leaderboard", *files, "--output", str(page), "--force"]) == 0
    assert FORCED_WARNING in capsys.readouterr().out
    assert FORCED_WARNING in page.read_text()


def test_long_name_is_cut_at_its_start_beside_the_bars_and_whole_in_the_table() -> None:
    name = "a-folder-of-runs-with-a-very-long-name-20261121T120000Z-bench"
    html = render_html(leaderboard_page([entry(name)], [], []))
    drawing, table = html.partition("<table")[::2]
    assert f">…{name[-50:]}<" in drawing
    assert name not in drawing.partition("<body")[2]
    assert name in table


def bench_folder(runs: Path, name: str, result: object) -> None:
    (runs / name).mkdir(parents=True)
    written(runs / name, "result", result)


def test_without_arguments_the_newest_runs_stand_among_the_references(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    bench_folder(runs, "20261121T120000Z-bench", entry("a", 40_000).run)
    bench_folder(runs, "20261122T120000Z-bench", entry("b", 30_000).run)
    bench_folder(runs, "20261122T130000Z-load", sample_run())
    assert main(["leaderboard", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in found["rows"]] == ["20261121T120000Z-bench", "h200", "20261122T120000Z-bench"]
    assert found["does_not_rank"] == []
    assert any("A reference keeps the engine" in note for note in found["notes"])
    html = (tmp_path / "leaderboard.html").read_text()
    assert "h200, shipped reference" in html
    assert "20261121T120000Z-bench, shipped" not in html


def test_without_runs_the_references_stand_alone_and_the_command_is_named(tmp_path: Path) -> None:
    entries, notes = newest_runs_and_references(tmp_path / "none")
    assert [each.name for each in entries] == ["h200"]
    assert notes == [f"No comparable run in {tmp_path / 'none'}: meltcore bench makes one."]


def test_runs_that_do_not_compare_with_the_newest_are_left_out_by_name(tmp_path: Path) -> None:
    bench_folder(tmp_path, "20261125T000000Z-bench", entry("x", not_comparable=["measured on a CPU"]).run)
    (tmp_path / "20261124T000000Z-bench").mkdir()
    bench_folder(tmp_path, "20261123T000000Z-bench", entry("a", weights="real").run)
    bench_folder(tmp_path, "20261122T000000Z-bench", entry("b").run)
    bench_folder(tmp_path, "20261121T000000Z-bench", entry("c", weights="real", engine="0.0.1+0").run)
    bench_folder(tmp_path, "20261120T000000Z-bench", entry("d", weights="real").run)
    entries, notes = newest_runs_and_references(tmp_path)
    assert [each.name for each in entries] == ["20261123T000000Z-bench", "20261120T000000Z-bench"]
    assert len(notes) == 4
    assert notes[0] == "Left out: 20261125T000000Z-bench: measured on a CPU."
    assert "holds no result.json" in notes[1]
    assert "20261122T000000Z-bench: the weights differ" in notes[2]
    assert "20261121T000000Z-bench: the engine versions differ" in notes[3]


def test_references_need_not_share_the_engine_of_the_runs_and_runs_must() -> None:
    reference = NamedScore("ref", entry("ref").run, is_reference=True)
    other = entry("other", engine="0.0.1+0")
    among = [entry("a"), NamedScore("ref", other.run, is_reference=True)]
    assert ranking_notes(among) == []
    assert "engine" not in leaderboard_page(among, [], []).subtitle
    assert "engine 0.0.1+0" in leaderboard_page([other], [], []).subtitle
    assert "engine versions differ" in ranking_notes([entry("a"), other, reference])[0]
