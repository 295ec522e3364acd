"""The actor of one engine: a start that is cancelled leaves no process. No Ray needed."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from waiting import WAIT_S

from meltcore.common.errors import EngineDeadError
from meltcore.common.process import end_group, ended_within, start
from meltcore.fleet.ray.engine_actor import EngineActor
from meltcore.protocol.cluster import StartEngine
from meltcore.settings.config import EngineConfig


@pytest.mark.parametrize("is_spawned", [True, False])
def test_start_that_is_cancelled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_spawned: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=SimpleNamespace(get_node_ip_address=lambda: "::1")))
    never_listens = ["-c", "import time; time.sleep(60)"]
    order = msgspec.json.encode(StartEngine(0, "a", never_listens, EngineConfig(model="m"), 1, "key", fleet="f"))

    async def run() -> None:
        actor = EngineActor()
        starting = asyncio.create_task(actor.start(order))
        async with asyncio.timeout(WAIT_S):
            while is_spawned and actor._process is None:  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0.01)
            if not is_spawned:
                await asyncio.sleep(0)  # the process is being started
            await actor.close()
            with pytest.raises(EngineDeadError, match=r"the engine ended before it listened \(killed by signal 9\)"):
                await starting
            assert "signal 9" in await actor.wait()
            with pytest.raises(EngineDeadError, match="its start was cancelled"):
                await actor.start(order)

    asyncio.run(run())
    assert not list(tmp_path.glob("meltcore-*"))


def test_process_that_has_the_id_of_an_ended_engine_is_left_alone() -> None:
    other = start(["sleep", "60"])  # it leads a group, as the engine did
    try:
        actor = EngineActor()
        actor._process = SimpleNamespace(pid=other.pid, returncode=0)  # type: ignore[assignment]
        actor.kill()
        assert not ended_within(other, 0.3)
        actor._process = SimpleNamespace(pid=other.pid, returncode=None)  # type: ignore[assignment]
        actor.kill()
        assert ended_within(other, WAIT_S), "it is the engine"
    finally:
        end_group(other, 0)
