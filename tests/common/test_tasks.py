"""The registry of tasks: what the records name exists, and a task of another package is found and checked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import WAIT_S

from meltcore.common.tasks import DEFAULT, load, setting_tasks, task_of, task_of_part, tasks
from meltcore.settings.fleet_spec import ModelSection

ECHO = """
from meltcore.common.tasks import Task
task = Task(
    name='echo', title='echo', paths={'/v1/echo': 'echo'}, backend='', engine='', messages='', needs='', concurrency=1
)
number = 5
"""
LIST = "from meltcore.common.tasks import tasks; print(*tasks())"


def package(folder: Path, source: str, value: str) -> Path:
    """A package with an entry point, as pip lays it out."""
    (folder / "other_tasks.py").write_text(source)
    metadata = folder / "other_tasks-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: other-tasks\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[meltcore.tasks]\necho = {value}\n")
    return folder


def run(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_the_records_of_built_in_tasks_name_what_exists() -> None:
    assert next(iter(tasks().values())) is DEFAULT
    paths = [path for task in tasks().values() for path in task.paths]
    assert len(paths) == len(set(paths))
    assert [task_of(path).name for path in ("/v1/completions", "/v1/translate")] == ["generation", "translation"]
    with pytest.raises(LookupError, match="no task answers /v1/models"):
        task_of("/v1/models")
    assert set(setting_tasks()) <= set(ModelSection.__struct_fields__)
    assert setting_tasks()["max_queue_chars"] == ("translation", "synthesis")


@pytest.mark.slow
@pytest.mark.parametrize("name", tasks())
def test_the_parts_of_a_built_in_task_can_be_imported(name: str) -> None:
    task = tasks()[name]
    parts = {part: load(getattr(task, part)) for part in ("backend", "engine", "needs")}
    assert all(map(callable, parts.values())), parts
    assert {path for route in task.routes for path in load(route).paths} >= set(task.paths)
    assert load(task.messages).ToEngine
    assert task_of_part(task.messages) is task_of_part(task.engine.partition(":")[0]) is task
    with pytest.raises(LookupError, match="is not a part of a task"):
        task_of_part("meltcore.serve")


def test_a_task_of_another_package_is_found_in_every_process(tmp_path: Path) -> None:
    found = run(LIST, package(tmp_path, ECHO, "other_tasks:task"))
    assert found.stdout.split() == [*tasks(), "echo"], found.stderr


@pytest.mark.parametrize(
    ("source", "value", "message"),
    [
        (ECHO, "other_tasks:number", "(other_tasks:number) is int; it must be a meltcore.common.tasks.Task"),
        (ECHO, "missing_tasks:task", "(missing_tasks:task) cannot be imported: No module named 'missing_tasks'"),
        (
            ECHO.replace("'echo',", "'synthesis',"),
            "other_tasks:task",
            "(other_tasks:task) has synthesis, which the task synthesis has",
        ),
        (
            ECHO.replace("echo'", "translate'"),
            "other_tasks:task",
            "(other_tasks:task) has /v1/translate, which the task translation has",
        ),
    ],
)
def test_an_entry_point_that_is_no_further_task_is_refused(
    tmp_path: Path, source: str, value: str, message: str
) -> None:
    failed = run(LIST, package(tmp_path, source, value))
    assert failed.returncode == 1
    assert f"the entry point echo of meltcore.tasks {message}" in failed.stderr


def test_importing_meltcore_reads_no_entry_points(tmp_path: Path) -> None:
    code = "import meltcore, meltcore.settings.config, meltcore.fleet.plan.context_memory; print('fine')"
    assert run(code, package(tmp_path, ECHO, "missing_tasks:task")).stdout == "fine\n"
