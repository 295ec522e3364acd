"""What cannot be stored in another format is one line with the reason. No model is needed."""

from __future__ import annotations

import importlib.util
import struct
import sys
from pathlib import Path

import pytest
import real_models
from test_gguf_file import ARRAY, TEXT, UINT32, file_of
from test_gguf_file import text as packed


@pytest.mark.parametrize(
    ("source", "target", "reason"),
    [
        ("missing.gguf", "new.gguf", r"No such file or directory: .*missing\.gguf"),
        ("text.gguf", "new.gguf", r"text\.gguf is no GGUF file"),
        ("empty.gguf", "new.gguf", r"empty\.gguf is no GGUF file"),
        (".", "new.gguf", "Is a directory"),
        ("text.gguf", "missing/new.gguf", r"missing is no folder; make it"),
        ("text.gguf", "empty.gguf/new.gguf", r"empty\.gguf is no folder"),
    ],
)
@pytest.mark.parametrize("form", ["q8_0", "safetensors"])
def test_files_that_cannot_be_stored_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, target: str, reason: str, form: str
) -> None:
    (tmp_path / "text.gguf").write_text("weights")
    (tmp_path / "empty.gguf").touch()
    monkeypatch.setattr(sys, "argv", ["real_models.py", "store", str(tmp_path / source), form, str(tmp_path / target)])
    with pytest.raises(SystemExit, match=f"^real_models.py: [^\n]*{reason}[^\n]*$"):
        real_models.main()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.gguf", "text.gguf"]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (packed("general.tags") + struct.pack("<IIQ", ARRAY, TEXT, 0), "general.tags is an empty array"),
        (packed("a.b") + struct.pack("<IIQ", ARRAY, UINT32, 0), "a.b is an empty array"),
        (packed("a.b") + struct.pack("<I", 99), "cannot be stored as q8_0: .* a.b has the unknown type 99"),
        (packed("a.b") + struct.pack("<IQ", TEXT, 2**40), "a.b takes 1099511627776 bytes"),
        (None, "cannot be stored as q8_0: KeyError: 'general.architecture'"),
    ],
)
def test_metadata_that_cannot_be_stored_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, reason: str
) -> None:
    architecture = packed("general.architecture") + struct.pack("<I", TEXT) + packed("llama")
    parts = [] if content is None else [architecture, content]
    source, target = tmp_path / "model.gguf", tmp_path / "new.gguf"
    source.write_bytes(file_of(*parts, values=len(parts), data=64))
    monkeypatch.setattr(sys, "argv", ["real_models.py", "store", str(source), "q8_0", str(target)])
    with pytest.raises(SystemExit, match=f"^real_models.py: [^\n]*{reason}[^\n]*$"):
        real_models.main()
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize("form", ["q8_0", "safetensors"])
def test_target_that_is_kept_is_said_not_to_be_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    target = tmp_path / "old.gguf"
    target.write_text("of another model")
    monkeypatch.setattr(sys, "argv", ["real_models.py", "store", str(tmp_path / "model.gguf"), form, str(target)])
    real_models.main()
    out, err = capsys.readouterr()
    assert out == f"{target}\n"
    kept = f"{target} is there already and is kept; it is not compared with {tmp_path / 'model.gguf'}"
    assert err == f"real_models.py: {kept}\n"
    assert target.read_text() == "of another model"


def test_missing_accelerate_is_named_before_transformers_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --group real"):
        real_models.store(tmp_path / "model.gguf", "safetensors", tmp_path / "folder")
