"""What a server prints when it is ready: the address of its page, and a request to try."""

from __future__ import annotations

import json
import shlex
from types import SimpleNamespace
from typing import Any

import pytest
from server_harness import scripted_server

from meltcore.common.tasks import Task, tasks
from meltcore.fleet.run.console import print_examples
from meltcore.settings.fleet_spec import FleetSpec, KeySection, ServerSection


def printed(task: Task | None, capsys: pytest.CaptureFixture[str], **sections: Any) -> list[str]:
    spec = FleetSpec(models={}, **sections)
    models: list[Any] = [SimpleNamespace(names=('it\'s "mine"',), task=task)]
    print_examples(spec, 8001, models)
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("task", tasks().values(), ids=lambda task: task.name)
def test_example_of_each_task_survives_the_shell(task: Task, capsys: pytest.CaptureFixture[str]) -> None:
    page, line = printed(task, capsys)
    assert page == "meltcore: http://127.0.0.1:8001/ is a page to try it"
    program, url, *words = shlex.split(line)
    assert (program, url.removeprefix("http://127.0.0.1:8001") in task.paths) == ("curl", True)
    if not task.is_upload:
        assert json.loads(words[words.index("-d") + 1])["model"] == 'it\'s "mine"'
        assert words[:2] == ["-H", "content-type: application/json"]


def test_example_has_a_key_where_the_server_wants_one(capsys: pytest.CaptureFixture[str]) -> None:
    task = next(iter(tasks().values()))
    key = KeySection(name="a", sha256="0" * 64)
    for sections in ({"keys": (key,)}, {"server": ServerSection(api_key_file="keys")}):
        assert "-H 'authorization: Bearer KEY'" in printed(task, capsys, **sections)[1]
    assert "authorization" not in printed(task, capsys)[1]
    assert len(printed(None, capsys)) == 1


@pytest.mark.slow
def test_server_prints_a_request_that_it_answers() -> None:
    with scripted_server() as server:
        assert server.process.stdout is not None
        line = next(line for line in server.process.stdout if line.startswith("curl "))
        _, url, *words = shlex.split(line)
        body = json.loads(words[words.index("-d") + 1])
        assert server.post(url.removeprefix(server.url), body | {"max_tokens": 2}).status == 200
