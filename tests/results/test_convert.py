"""Documents of schema version 1 are read and converted, and no number changes."""

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from meltcore.cli.main import main
from meltcore.errors import ConfigError
from meltcore.report.documents import DOCUMENT_TYPES, convert_folder, find_documents, open_document
from meltcore.results.convert import RENAMES, Renames, document_type, to_current
from meltcore.results.files import read_document
from meltcore.results.schema import SCHEMA_VERSION
from meltcore.results.starts import StartSet, read_start_set

SAMPLES = Path(__file__).parent / "version_1"
DOCUMENTS = sorted(set(RENAMES) - {"fingerprint"})
_VERSION_KEYS = ("schema_version", "tuning_version", "gaps_version", "judgement_version", "starts_version",
                 "card_version")  # fmt: skip


def numbers(value: Any) -> Iterator[float]:
    """Every number of a document but its schema versions."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in _VERSION_KEYS:
                yield from numbers(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers(inner)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


def sample(name: str) -> Any:
    return json.loads((SAMPLES / f"{name}.json").read_text())


@pytest.mark.parametrize("name", DOCUMENTS)
def test_conversion_changes_no_number(name: str) -> None:
    before = sample(name)
    after = to_current(before)
    assert document_type(before) == document_type(after) == name
    assert Counter(numbers(after)) == Counter(numbers(before))
    assert to_current(after) is after


@pytest.mark.parametrize("name", DOCUMENTS)
def test_version_1_document_is_read_without_losing_a_number(name: str, tmp_path: Path) -> None:
    content = read_document(SAMPLES / f"{name}.json", *DOCUMENT_TYPES, StartSet)
    assert content.schema_version == SCHEMA_VERSION  # type: ignore[attr-defined]
    written = json.loads(msgspec.json.encode(content))
    assert not Counter(numbers(sample(name))) - Counter(numbers(written))


def test_nested_documents_get_their_own_type_and_version() -> None:
    card = to_current(sample("card"))
    nested = [card["snapshot"], card["certificate"], card["benchmark"], card["certificate"]["snapshot"]]
    nested += [*card["runs"], *card["tunings"], *card["profiles"], *card["comparisons"]]
    assert {each["schema_version"] for each in nested} == {SCHEMA_VERSION}
    assert {each["document"] for each in nested} == set(RENAMES) - {"fingerprint", "baseline", "card"}


def test_keys_and_values_are_renamed_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    table = Renames(
        keys={"checks.*.rows.*.share": "ratio", "notes": "remarks"},
        values={"checks.*.name": [("^product$", "gemm")], "required.*": [("^product$", "gemm")]},
        parts={"snapshot": "snapshot"},
    )
    monkeypatch.setitem(RENAMES, "certificate", table)
    monkeypatch.setitem(RENAMES, "snapshot", Renames(keys={"gpus.*.facts.*.share": "ratio"}))
    old = {
        "schema_version": 1,
        "tier": "quick",
        "required": ["product", "products"],
        "share": 1,
        "notes": ["product"],
        "checks": [{"name": "product", "rows": [{"share": 0.5, "notes": 2}]}],
        "snapshot": {"schema_version": 1, "gpus": [{"facts": {"any": {"share": 3}}}], "topology": []},
    }
    assert to_current(old) == {
        "document": "certificate",
        "schema_version": 2,
        "tier": "quick",
        "required": ["gemm", "products"],
        "share": 1,
        "remarks": ["product"],
        "checks": [{"name": "gemm", "rows": [{"ratio": 0.5, "notes": 2}]}],
        "snapshot": {
            "document": "snapshot",
            "schema_version": 2,
            "gpus": [{"facts": {"any": {"ratio": 3}}}],
            "topology": [],
        },
    }


def test_folder_is_converted_in_place_and_only_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = tmp_path / "runs"
    shutil.copytree(SAMPLES, runs / "inner")
    (runs / "other.json").write_text('{"rows": [1]}')
    assert main(["report", "--convert", str(runs)]) == 0
    assert f"{len(DOCUMENTS)} converted, 0 of the current schema version" in capsys.readouterr().out
    for name in DOCUMENTS:
        after = json.loads((runs / "inner" / f"{name}.json").read_text())
        assert after == to_current(sample(name))
    assert (runs / "other.json").read_text() == '{"rows": [1]}'
    assert main(["report", "--convert", str(runs)]) == 0
    assert f"0 converted, {len(DOCUMENTS)} of the current schema version" in capsys.readouterr().out
    assert len(find_documents(runs / "inner" / "run.json")) == 1


@pytest.mark.parametrize("text", ["{", '{"schema_version": 1, "command": "load"}', '{"tuning_version": 9}'])
def test_nothing_is_converted_where_one_document_cannot_be(text: str, tmp_path: Path) -> None:
    shutil.copytree(SAMPLES, tmp_path / "runs")
    (tmp_path / "runs" / "z.json").write_text(text)
    with pytest.raises(ConfigError, match=r"z\.json"):
        convert_folder(tmp_path / "runs")
    for name in DOCUMENTS:
        assert json.loads((tmp_path / "runs" / f"{name}.json").read_text()) == sample(name)


def test_version_1_documents_work_everywhere(tmp_path: Path) -> None:
    assert open_document(SAMPLES / "comparison.json").type == "comparison"
    shutil.copyfile(SAMPLES / "baseline.json", tmp_path / "set.json")
    assert read_start_set(tmp_path).name == "A"
    assert main(["report", str(SAMPLES / "run.json"), "--output", str(tmp_path / "run.html")]) == 0
    with pytest.raises(ConfigError, match="there is no folder"):
        convert_folder(SAMPLES / "card.json")
