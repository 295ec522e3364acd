"""Commands that meet the end of the fleet: an error that says so, and no traceback."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import WAIT_S

from meltcore.common.errors import ConfigError
from meltcore.fleet import daemon
from meltcore.fleet.admin.operations import FleetOperations


def test_restart_of_a_model_whose_loading_is_cancelled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = SimpleNamespace(name="a", config=SimpleNamespace(names=("a",)), status="loading", limits=None)
    supervisor: Any = SimpleNamespace(models={0: model})

    async def replace(*_: object) -> Any:
        loading = asyncio.create_task(asyncio.sleep(60))
        asyncio.get_running_loop().call_soon(loading.cancel)  # as the end of the fleet does
        return SimpleNamespace(loading=loading, status="draining", reason="")

    async def restart() -> None:
        operations = FleetOperations(supervisor, None)
        monkeypatch.setattr(operations, "_replace", replace)
        await asyncio.wait_for(operations.restart("a"), WAIT_S)

    with pytest.raises(ConfigError, match="a was ended while it was loading"):
        asyncio.run(restart())


def test_down_of_a_fleet_that_has_just_ended_succeeds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kill(pid: int, signum: int) -> None:
        raise ProcessLookupError(pid, signum)

    monkeypatch.setattr(os, "kill", kill)
    ended = daemon.DaemonRecord(pid=2**22, start_ticks=1, port=1, url="http://127.0.0.1:1", model="a", log="")
    assert daemon.stop([ended], 1.0) == 0
    assert "stopped http://127.0.0.1:1 (a)" in capsys.readouterr().out
