"""Folders of a node: the last owner removes them, and the next start those of owners that were killed."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from meltcore.common.process import end_group, start
from meltcore.fleet.ray.node_folder import NodeFolder, remove_abandoned

OWNER = """
import subprocess, sys, time
from meltcore.fleet.ray.node_folder import NodeFolder
folder = NodeFolder(sys.argv[1])
(folder.path / "output").write_text("kept")
subprocess.Popen(["sleep", "60"], pass_fds=[folder.descriptor])
print("started", flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_next_start_removes_the_folder_of_a_killed_owner_once_its_engine_has_ended(tmp_path: Path) -> None:
    owner = start([sys.executable, "-c", OWNER, "engine-a"], stdout=subprocess.PIPE)  # it leads their group
    path = tmp_path / "meltcore-engine-a"
    try:
        assert owner.stdout is not None
        assert owner.stdout.readline()
        remove_abandoned()
        assert path.exists(), "its owner lives"
        owner.kill()
        owner.wait(10)
        remove_abandoned()
        assert (path / "output").read_text() == "kept", "its engine lives"
    finally:
        end_group(owner, 5.0)
    (tmp_path / "meltcore-certificate-1").mkdir()  # of others
    NodeFolder("node-b").close()
    assert [each.name for each in tmp_path.iterdir()] == ["meltcore-certificate-1"]


def test_last_owner_removes_a_shared_folder(tmp_path: Path) -> None:
    first, second = NodeFolder("marks-f"), NodeFolder("marks-f")
    assert first.path == second.path == tmp_path / "meltcore-marks-f"
    assert first.path.stat().st_mode & 0o777 == 0o700
    first.close()
    NodeFolder("engine-c").close()
    assert second.path.exists(), "it has an owner"
    second.close()
    assert not list(tmp_path.iterdir())
