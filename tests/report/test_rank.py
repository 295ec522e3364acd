"""Ranking: best first, unlike results refused, forced ones marked."""

import json
from pathlib import Path

import msgspec
import pytest
from sample_certificates import certificate
from sample_results import sample_run
from sample_scores import sample_device, sample_health, sample_scored_run

from meltcore.cli.main import main
from meltcore.errors import ConfigError
from meltcore.report.rank import Entry, cautions, ranked, read_entry, reasons_not_to_rank
from meltcore.report.rank_page import FORCED, render_rank
from meltcore.results.score import ScoredRun


def entry(name: str, peak: float = 30_000.0, **changes: object) -> Entry:
    return Entry(name, sample_scored_run([sample_device(peak)], **changes))


def written(folder: Path, name: str, result: object) -> str:
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(result))
    return str(path)


def test_results_stand_best_first() -> None:
    order = ranked([entry("slow", 9_000), entry("fast", 32_000), entry("middle", 20_000)])
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
        ranked(entries)
    assert len(ranked(entries, force=True)) == 2


def test_a_folder_of_the_same_name_is_the_same_model() -> None:
    assert reasons_not_to_rank([entry("a", weights="real"), entry("b", weights="real", model="qwen3-0.6b")]) == []


def test_a_forced_chart_is_marked_in_words_and_in_every_drawing() -> None:
    entries = [entry("a"), entry("b", weights="real")]
    html = render_rank(ranked(entries, force=True), reasons_not_to_rank(entries), [])
    drawings = html.split("<svg")[1:]
    assert len(drawings) == 2
    assert all(FORCED in drawing.split("</svg>")[0] for drawing in drawings)
    assert "the weights differ: dummy (a), real (b)" in html
    like = [entry("a"), entry("b", 20_000)]
    assert "FORCED" not in render_rank(like, reasons_not_to_rank(like), [])


def test_what_may_explain_a_difference_is_said_and_forbids_nothing() -> None:
    short = entry("short", duration_s=60.0)
    short.run.fingerprint.versions["torch"] = "2.12.0"
    hot = Entry("hot", sample_scored_run([sample_device(health=sample_health(verdict="DEGRADED"))]))
    late = entry("late")
    late.run.verdict = "CLIENT_BOUND"
    node = Entry("node", sample_scored_run([sample_device(), sample_device(memory_in_use_bytes=12 * 2**30)]))
    entries = [entry("long"), short, hot, late, node]
    assert reasons_not_to_rank(entries) == []
    told = "\n".join(cautions(entries))
    for part in (
        "1 min 0 s (short)",
        "torch was not the same: 2.11.0, 2.12.0",
        "their numbers differ: 1 (long, short, hot, late), 2 (node)",
        "hot: a GPU was DEGRADED",
        "late: the",
        "node: other programs held memory",
    ):
        assert part in told
    assert cautions([entry("a"), entry("b")]) == []


def test_a_result_without_a_score_has_no_place() -> None:
    broken = sample_scored_run([sample_device(sustained=None)], not_comparable=["the run did not get to its end"])
    assert [each.name for each in ranked([entry("a"), Entry("b", broken)], force=True)] == ["a"]
    with pytest.raises(ConfigError, match="none of these results has a score"):
        ranked([Entry("b", broken)], force=True)


def test_eight_gpus_are_named_once() -> None:
    eight = Entry("a", sample_scored_run([sample_device(label=f"GPU {n}") for n in range(8)]))
    assert eight.hardware == "8 × NVIDIA H200"
    mixed = Entry("b", sample_scored_run([sample_device(), sample_device(name="NVIDIA L4")]))
    assert mixed.hardware == "NVIDIA H200 + NVIDIA L4"


def test_files_and_run_folders_are_read_and_other_results_refused(tmp_path: Path) -> None:
    assert read_entry(written(tmp_path, "h200", sample_scored_run())).name == "h200"
    folder = tmp_path / "20261121T120000Z-bench"
    folder.mkdir()
    written(folder, "result", sample_scored_run())
    for path in (folder, folder / "result.json"):
        found = read_entry(str(path))
        assert found.name == folder.name
        assert isinstance(found.run, ScoredRun)
    with pytest.raises(ConfigError, match="a result of meltcore demo, not of meltcore bench"):
        read_entry(written(tmp_path, "demo", sample_run()))
    with pytest.raises(ConfigError, match="is a certificate, not of meltcore bench"):
        read_entry(written(tmp_path, "certificate", certificate(tmp_path, gpus=1)))


def test_a_folder_without_a_result_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no result\.json: a run that ended before it could write one"):
        read_entry(str(tmp_path))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "no JSON"),
        ('{"schema_version": 1, "comm', "no JSON"),
        ("[]", "nothing that a command of meltcore wrote"),
        ('{"schema_version": 1, "command": "bench"}', "breaks result schema version 1"),
        ('{"schema_version": 99, "command": "bench"}', "schema version 99"),
        (None, "No such file"),
    ],
)
def test_a_file_that_is_no_score_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, told: str
) -> None:
    path = tmp_path / "mine.json"
    if content is not None:
        path.write_text(content)
    assert main(["rank", str(path), "--output", str(tmp_path / "rank.html")]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("meltcore rank: ")
    assert "mine.json" in shown
    assert told in shown
    assert shown.count("\n") == 1


def test_the_command_writes_the_page_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, name, entry(name, peak).run) for name, peak in (("slow", 9e3), ("fast", 3e4))]
    page = tmp_path / "rank.html"
    assert main(["rank", *files, "--output", str(page)]) == 0
    shown = capsys.readouterr().out
    assert shown.index("fast") < shown.index("slow")
    assert "30,000" in shown
    assert page.read_text().index(">fast<") < page.read_text().index(">slow<")
    assert main(["rank", *files, "--output", str(page), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["name"] for row in rows] == ["fast", "slow"]


def test_the_command_refuses_unlike_results_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [written(tmp_path, "a", entry("a").run), written(tmp_path, "b", entry("b", weights="real").run)]
    page = tmp_path / "rank.html"
    assert main(["rank", *files, "--output", str(page)]) == 2
    told = capsys.readouterr().err
    assert told.startswith("meltcore rank: these results do not rank: the weights differ: dummy (a), real (b)")
    assert not page.exists()
    assert main(["rank", *files, "--output", str(tmp_path / "no" / "rank.html"), "--force"]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert main(["rank", *files, "--output", str(page), "--force"]) == 0
    assert FORCED in capsys.readouterr().out
    assert FORCED in page.read_text()


def test_a_long_name_is_cut_at_its_front_beside_the_bars_and_whole_in_the_table() -> None:
    name = "a-folder-of-runs-with-a-very-long-name-20261121T120000Z-bench"
    html = render_rank([entry(name)], [], [])
    drawing, table = html.partition("<table")[::2]
    assert f">…{name[-50:]}<" in drawing
    assert name not in drawing.partition("<body")[2]
    assert name in table
