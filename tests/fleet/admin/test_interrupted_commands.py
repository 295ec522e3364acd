"""Commands that meet the end of the fleet: an error that says so, and no traceback."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.common.process import start_ticks
from meltcore.fleet import daemon
from meltcore.fleet.admin.operations import FleetOperations
from meltcore.fleet.plan.planned import NoFile


def test_restart_of_a_model_whose_loading_is_cancelled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(name="a", names=("a",), config=None, status="loading", limits=None)
    supervisor: Any = SimpleNamespace(models={0: model})

    async def replace(*_: object) -> Any:
        loading = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(loading.cancel)  # as the end of the fleet does
        return SimpleNamespace(loading=loading, status="draining", reason="")

    async def restart() -> None:
        planner: Any = SimpleNamespace(check_changeable=lambda: None)
        operations = FleetOperations(supervisor, planner)
        monkeypatch.setattr(operations, "_replace", replace)
        await asyncio.wait_for(operations.restart("a"), WAIT_S)

    with pytest.raises(ConfigError, match="a was ended while it was loading"):
        asyncio.run(restart())


def test_server_without_a_fleet_yaml_is_not_changed() -> None:
    """Its engine would not be started again."""
    operations = FleetOperations(SimpleNamespace(read_running=None), NoFile())  # type: ignore[arg-type]
    changes = (operations.reload, lambda: operations.restart(None), lambda: operations.sleep("a"))
    for change in (*changes, lambda: operations.wake("a")):
        with pytest.raises(ConfigError, match=r"started without a fleet\.yaml: end it, and start it with other option"):
            asyncio.run(change())


def test_down_finds_fleets_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    ticks = start_ticks(os.getpid())
    assert ticks is not None
    for command, port in (("serve", 8000), ("up", 8001)):
        record = daemon.DaemonRecord(os.getpid(), ticks, port, f"http://127.0.0.1:{port}", "m", "")
        (daemon.state_dir() / f"{command}-{port}.json").write_bytes(msgspec.json.encode(record))
    assert [record.port for record in daemon.running()] == [8000, 8001]
    assert daemon.find_fleet(None).port == 8001
    with pytest.raises(ConfigError, match="no fleet is running on port 8000"):
        daemon.find_fleet(8000)


def test_down_of_a_fleet_that_has_just_ended_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(pid: int, signum: int) -> None:
        raise ProcessLookupError(pid, signum)

    monkeypatch.setattr(os, "kill", kill)
    ended = daemon.DaemonRecord(pid=2**22, start_ticks=1, port=1, url="http://127.0.0.1:1", model="a", log="")
    assert daemon.stop([ended], 1.0) == 0
    assert "stopped http://127.0.0.1:1 (a)" in capsys.readouterr().out
