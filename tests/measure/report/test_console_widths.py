"""Tables on narrow terminals: no word is broken, no line is longer than the terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from places import ROOT
from rich.console import Console

from meltcore.cli.main import main
from meltcore.measure.report.page.console import print_table
from meltcore.measure.report.page.page import Cell, Column, Row, Table

HEADS = ("model", "state", "pid", "memory")
ROWS = (
    ("indictrans2-indic-indic", "waiting for another model", "4194304", "12.25 GiB"),
    ("a [bold] name", "ready", "7", "1 KiB"),
)


def printed(width: int) -> str:
    columns = [Column(head, align="text" if head in ("model", "state") else "right") for head in HEADS]
    output = io.StringIO()
    print_table(Table(columns, [Row([Cell(cell) for cell in row]) for row in ROWS]), Console(file=output, width=width))
    return output.getvalue()


@pytest.mark.parametrize("width", [160, 80, 66, 60, 50, 44, 40, 30])
def test_words_stay_whole_at_any_width(width: int) -> None:
    text = printed(width)
    assert max(map(len, text.splitlines())) <= width
    words = set(re.split(r"[\s,]+", text))
    for row in (HEADS[1:], *ROWS):
        assert {word.rstrip(":") for cell in row for word in cell.split()} <= {word.rstrip(":") for word in words}


def test_no_heading_breaks_a_word() -> None:
    for path in sorted((ROOT / "src/meltcore/measure").rglob("*.py")):
        assert re.findall(r"\w+-\\n[a-z]\w*", path.read_text()) == [], path


def test_wide_terminal_has_a_line_per_row_and_a_narrow_one_a_block() -> None:
    assert len(printed(80).splitlines()) == 4, "heads, a rule and the rows"
    assert "  state: ready, pid: 7" in printed(30)


def test_plan_of_the_written_fleet_is_a_table_at_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    file = tmp_path / "fleet.yaml"
    assert main(["fleet", "init", str(file)]) == 0
    assert main(["plan", str(file), "--vram", "141"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line for line in lines if line.startswith("indictrans2-indic-indic "))
    assert len(row) <= 80
    assert len(row.split()) == 9
