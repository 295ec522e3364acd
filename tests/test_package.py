"""The wheel: what it holds, and with MELTCORE_TEST_WHEEL=1 that it needs nothing of the repository (10 minutes)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from places import ROOT

import meltcore

PACKAGE = ROOT / "src" / "meltcore"
MOST_BYTES = 40 * 10**6
NOT_SHIPPED = {"AGENTS.md"}


def test_every_file_of_the_package_is_in_the_wheel() -> None:
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["meltcore"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    tracked = subprocess.run(["git", "ls-files", "src/meltcore"], cwd=ROOT, capture_output=True, text=True, check=False)
    if tracked.returncode:
        pytest.skip("this is no clone, so files that users made cannot be told from the package's")
    files = [ROOT / name for name in tracked.stdout.split()]
    assert len(files) > 600
    missing = [path for path in files if path.suffix != ".py" and path not in shipped and path.name not in NOT_SHIPPED]
    assert missing == []
    assert sum(path.stat().st_size for path in files) < 2 * MOST_BYTES  # weights shrink by a third in a wheel


def test_version_is_the_newest_of_the_changelog() -> None:
    versions = re.findall(r"^## (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == meltcore.__version__
    assert "CHANGELOG.md" in (ROOT / "docs" / "changelog.md").read_text()


@pytest.mark.slow
@pytest.mark.skipif("MELTCORE_TEST_WHEEL" not in os.environ, reason="MELTCORE_TEST_WHEEL=1 builds and installs a wheel")
@pytest.mark.timeout(1800)
def test_a_fresh_environment_with_the_wheel_alone_runs_the_demo(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    clean |= {"HOME": str(tmp_path)}

    def run(*command: str | Path) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    source = tmp_path / "source"
    run("git", "clone", "--quiet", "--no-hardlinks", ROOT, source)
    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "build")
    run(python, "-m", "build", "--outdir", tmp_path, source)
    (wheel,) = tmp_path.glob("meltcore-*.whl")
    assert wheel.name.startswith(f"meltcore-{meltcore.__version__}-")
    assert wheel.stat().st_size < MOST_BYTES
    assert not any("AGENTS" in name or "tests" in name for name in zipfile.ZipFile(wheel).namelist())
    constraints = source / "constraints.txt"
    run(python, "-m", "pip", "install", "--quiet", "-c", constraints, f"{wheel}[audio,clients,engine,translate]")
    constraints.unlink()
    demo = run(tmp_path / "venv" / "bin" / "meltcore", "demo", "--levels", "10,100")
    assert "passed: all" in demo
