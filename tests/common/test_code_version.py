"""The version that nodes and results name: another one for other code."""

from __future__ import annotations

from pathlib import Path

import pytest

from meltcore import __version__
from meltcore.common.code_version import code_version


@pytest.mark.parametrize("name", ["norm.py", "norm.cu"])
def test_version_changes_with_the_code(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meltcore.__file__", str(tmp_path / "__init__.py"))
    version = code_version.__wrapped__
    (tmp_path / "kernels").mkdir()
    (tmp_path / "api").mkdir()
    kernel = tmp_path / "kernels" / name
    kernel.write_text("SIZE = 64\n")
    first = [version(), version("kernels"), version("api")]
    assert first == [version(), version("kernels"), version("api")]
    assert all(each.startswith(f"{__version__}+") for each in first)
    kernel.write_text("SIZE = 128\n")
    assert [new == old for new, old in zip([version(), version("kernels"), version("api")], first, strict=True)] == [
        False,
        False,
        True,
    ]
