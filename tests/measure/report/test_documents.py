"""Documents are known by their content, and each has a page that can be drawn again."""

from pathlib import Path

import msgspec
import pytest
from sample_documents import (
    benchmark,
    comparison,
    document,
    evaluation,
    precisions,
    profile,
    scripted_certificate,
    tuning,
)

from meltcore.cli.main import main
from meltcore.common.errors import ConfigError
from meltcore.measure.documents.values.documents import PAGE_FILES, Content, find_documents, open_document


def write(folder: Path, content: Content) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / document(content).path.name
    path.write_bytes(msgspec.json.encode(content))
    return path


@pytest.mark.parametrize("content", [tuning(), precisions(), comparison(), profile(), evaluation(), benchmark()])
def test_run_of_each_command_is_drawn_again_beside_it(
    content: Content, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "run", content)
    assert open_document(path).content == content
    assert main(["report", str(tmp_path / "run")]) == 0
    page = tmp_path / "run" / PAGE_FILES[path.name]
    assert capsys.readouterr().out.strip() == str(page)
    assert page.read_text().startswith("<!doctype html>")


def test_certificate_is_drawn_again_and_a_snapshot_has_no_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certified = scripted_certificate(tmp_path)
    write(tmp_path / "certify", certified)
    assert main(["report", str(tmp_path / "certify"), "--output", str(tmp_path / "here.html")]) == 0
    assert "meltcore <span>certificate" in (tmp_path / "here.html").read_text()
    (tmp_path / "any.json").write_bytes(msgspec.json.encode(certified.snapshot))
    assert open_document(tmp_path / "any.json").type == "snapshot"
    assert main(["report", str(tmp_path / "any.json")]) == 2
    assert "has no page of its own" in capsys.readouterr().err


def test_folder_is_searched_one_level_deep(tmp_path: Path) -> None:
    write(tmp_path / "tune", tuning())
    write(tmp_path / "certify", scripted_certificate(tmp_path))
    write(tmp_path / "certify" / "inner", evaluation())
    assert [each.type for each in find_documents(tmp_path)] == ["certificate", "tuning"]
    assert [each.type for each in find_documents(tmp_path / "certify")] == ["certificate"]
    (tmp_path / "snapshot.json").write_bytes(msgspec.json.encode(scripted_certificate(tmp_path).snapshot))
    assert [each.type for each in find_documents(tmp_path)] == ["certificate", "tuning", "snapshot"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "is not valid JSON"),
        ("[1]", "is not a meltcore document"),
        ('{"document": "tuning", "schema_version": 2}', "breaks the schema of a tuning"),
        ('{"document": "run", "schema_version": 99}', "schema version 99; this meltcore reads version 2"),
        ('{"tuning_version": 1}', "is not a meltcore document"),
    ],
)
def test_what_is_no_document_is_refused_by_name(text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "odd.json").write_text(text)
    with pytest.raises(ConfigError, match=reason):
        open_document(tmp_path / "odd.json")


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, msgspec.structs.replace(tuning(), schema_version=9))
    with pytest.raises(ConfigError, match="has schema version 9; this meltcore reads version 2"):
        open_document(path)


def test_places_that_hold_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        find_documents(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds nothing to report on"):
        find_documents(tmp_path)
    (tmp_path / "requests.jsonl").touch()
    with pytest.raises(ConfigError, match="ended before it could write one"):
        find_documents(tmp_path)


def test_page_of_one_run_and_a_card_go_to_different_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [str(write(tmp_path / name, tuning())) for name in ("one", "two")]
    assert main(["report", *places, "--output", str(tmp_path / "x.html")]) == 2
    assert "a card goes to a folder: --out" in capsys.readouterr().err
