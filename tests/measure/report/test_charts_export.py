"""Charts as one SVG or PNG file: complete, without the page's style sheet, or a clear refusal."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from sample_results import sample_run
from sample_scores import sample_device, sample_scored_run

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.values.scores import NamedScore
from meltcore.measure.report.page.charts_export import check_export, export_page
from meltcore.measure.report.page.page import Page
from meltcore.measure.report.scores.leaderboard import leaderboard_page
from meltcore.measure.report.scores.score import score_page

SVG = "{http://www.w3.org/2000/svg}"


def exported(page: Page, path: Path) -> ElementTree.Element:
    export_page(page, path)
    return ElementTree.fromstring(path.read_text())


def test_every_chart_of_a_score_stands_in_one_svg_with_its_title(tmp_path: Path) -> None:
    root = exported(score_page(sample_scored_run([sample_device(), sample_device(label="GPU 1")])), tmp_path / "a.svg")
    charts = root.findall(f"{SVG}svg")
    assert len(charts) == 5 + 2, "five over load, one over time per GPU"
    titles = [each.text for each in root.iter(f"{SVG}text") if each.get("class") == "title"]
    assert titles[:2] == ["Output tokens per second", "Utilization, GPU 0"]
    assert titles[-2:] == ["Over time", "Over time"]
    boxes = [tuple(float(chart.get(key, "")) for key in ("x", "y", "width", "height")) for chart in charts]
    for at, (x, y, width, height) in enumerate(boxes):
        assert x >= 0
        assert x + width <= float(root.get("width", ""))
        assert y + height <= float(root.get("height", ""))
        for left, top, wide, high in boxes[:at]:
            assert x >= left + wide or left >= x + width or y >= top + high, "charts overlap"


def test_svg_stands_alone_in_light_colors(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    exported(score_page(sample_scored_run()), path)
    text = path.read_text()
    assert "var(--" not in text
    assert "svg .line.c1 { stroke: #2f6fde; }" in text
    assert not re.search(r"<script|@import|url\(|href=|https?://(?!www\.w3\.org/2000/svg)", text)


def test_names_are_escaped(tmp_path: Path) -> None:
    entry = NamedScore("<b>&", sample_scored_run([sample_device(name="<i>H200</i>")]))
    root = exported(leaderboard_page([entry], [], []), tmp_path / "a.svg")
    assert any("<i>H200</i>" in (each.text or "") for each in root.iter(f"{SVG}tspan"))


@pytest.mark.parametrize(
    ("name", "message"),
    [("a.jpg", "must end in .svg or .png"), ("a", "must end in"), ("no/a.svg", "there is no folder .*no")],
)
def test_other_names_are_refused(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_export(tmp_path / name)


def test_page_without_charts_is_refused(tmp_path: Path) -> None:
    page = Page(title="", name="", subtitle="", sections=[], footer="")
    with pytest.raises(ConfigError, match="this page has no chart"):
        export_page(page, tmp_path / "a.svg")


def test_png_without_its_package_says_how_to_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(
        ConfigError, match=r"needs the package resvg-py \(pip install 'meltcore\[png\]'\).*rsvg-convert"
    ):
        check_export(tmp_path / "a.png")


def test_png_without_fonts_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=lambda **_: b"blank"))
    with pytest.raises(ConfigError, match=r"none of the fonts DejaVu Sans, .* is installed"):
        check_export(tmp_path / "a.png")


def test_png_is_what_the_rasterizer_drew_of_the_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []

    def svg_to_bytes(svg_string: str, zoom: float, background: str, sans_serif_family: str) -> bytes:
        drawn.append(svg_string)
        return b"\x89PNG" + svg_string.encode()

    monkeypatch.setitem(sys.modules, "resvg_py", SimpleNamespace(svg_to_bytes=svg_to_bytes))
    page = score_page(sample_scored_run())
    export_page(page, tmp_path / "a.png")
    export_page(page, tmp_path / "a.svg")
    assert (tmp_path / "a.png").read_bytes() == b"\x89PNG" + (tmp_path / "a.svg").read_bytes()


def test_real_png_has_twice_the_size_of_the_svg(tmp_path: Path) -> None:
    pytest.importorskip("resvg_py", reason="the optional package of meltcore[png]")
    root = exported(score_page(sample_scored_run()), tmp_path / "a.svg")
    export_page(score_page(sample_scored_run()), tmp_path / "a.png")
    png = (tmp_path / "a.png").read_bytes()
    assert png.startswith(b"\x89PNG")
    assert int.from_bytes(png[16:20], "big") == 2 * int(root.get("width", ""))


def test_commands_export_and_refuse_before_they_measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "mine.json"
    result.write_bytes(msgspec.json.encode(sample_scored_run()))
    board, report = tmp_path / "board.svg", tmp_path / "report.svg"
    assert main(["leaderboard", str(result), "--output", str(tmp_path / "b.html"), "--export", str(board)]) == 0
    assert main(["report", str(result), "--export", str(report)]) == 0
    assert len(ElementTree.fromstring(board.read_text()).findall(f"{SVG}svg")) == 2
    assert len(ElementTree.fromstring(report.read_text()).findall(f"{SVG}svg")) == 6
    capsys.readouterr()
    assert main(["bench", "--cpu", "--out", str(tmp_path / "runs"), "--export", str(tmp_path / "a.gif")]) == 2
    assert "must end in .svg or .png" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["leaderboard", str(result), "--output", str(tmp_path / "n.html"), "--export", "a.gif"]) == 2
    assert not (tmp_path / "n.html").exists()
    assert main(["bench", "--cpu", "--out", str(tmp_path / "runs"), "--sweep-output-lens", "8"]) == 2
    assert "--sweep-output-lens needs --sweep" in capsys.readouterr().err
    other = tmp_path / "other.json"
    other.write_bytes(msgspec.json.encode(sample_run()))
    assert main(["report", str(result), str(other), "--card", "--export", str(report)]) == 2
