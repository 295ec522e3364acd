"""What cannot be stored in another format is one line with the reason. No model is needed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import real_models


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


def test_missing_accelerate_is_named_before_transformers_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --group real"):
        real_models.store(tmp_path / "model.gguf", "safetensors", tmp_path / "folder")
