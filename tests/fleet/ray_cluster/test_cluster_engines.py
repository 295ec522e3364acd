"""What goes through Ray for engines on nodes, and what is told of them. No Ray needed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scripted_cluster import LINES, Node, ScriptedCluster
from scripted_fleet import TWO_MODELS, fleet, rows, states
from server_harness import MODEL
from waiting import wait_until

from meltcore.cli.main import main
from meltcore.fleet.daemon import find_fleet
from meltcore.protocol.cluster import EngineListening, FromDriver
from meltcore.protocol.tcp import read_address

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def test_only_public_keys_go_through_ray(tmp_path: Path) -> None:
    cluster = ScriptedCluster(tmp_path, a=Node("a", [40], host_gib=8))
    with fleet(tmp_path, cluster, TWO_MODELS) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        folders = [path.parent for path in Path(find_fleet(server.port).admin).parent.glob("*/address.json")]
        first, second = (read_address(folder) for folder in folders)
        lines = (tmp_path / LINES).read_bytes().splitlines()
        files = [
            path for path in tmp_path.glob("tmp*/*/*") if path.is_file()
        ]  # those that an engine and its actor share
        told = {msgspec.json.decode(path.read_bytes())["engine_key"] for path in files if path.suffix == ".json"}
    assert first is not None
    assert second is not None
    assert first.client_keys == second.client_keys
    assert first.engine_key != second.engine_key
    assert told == {first.engine_key, second.engine_key}
    listening = [line for line in lines if b'"listening"' in line]
    messages = [msgspec.json.decode(line, type=FromDriver) for line in listening]
    keys = {message.listening.engine_key for message in messages if isinstance(message, EngineListening)}
    assert keys == told
    assert sum(first.client_keys.public.encode() in line for line in lines) == 2
    assert not [line for line in lines if b"secret" in line or first.client_keys.secret.encode() in line]


def test_ps_names_the_node_of_each_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def nodes() -> dict[str, str]:
        return {name: row["node"] for name, row in rows(server).items()}

    def column() -> list[str]:
        capsys.readouterr()
        main(["ps"])
        heads, _, *lines = capsys.readouterr().out.splitlines()
        return [line.split()[3] for line in (heads, *lines[:2])]

    cluster = ScriptedCluster(tmp_path, a=Node("a", host_gib=8), b=Node("b", [40]))
    with fleet(tmp_path, cluster, TWO_MODELS) as server:
        wait_until(lambda: states(server) == ["ready"] * 2, "ready")
        assert nodes() == {f"{MODEL}.0": "a", "gpu.0": "b"}
        assert column() == ["node", "a", "b"]
        with cluster.change() as there:
            del there.nodes["b"]
        wait_until(lambda: rows(server)["gpu.0"]["state"] == "pending", "pending")
        assert nodes()["gpu.0"] == ""
        assert column() == ["node", "a", "-"]
        with cluster.change() as there:
            there.nodes["c"] = Node("c", [40])
        wait_until(lambda: nodes()["gpu.0"] == "c", "another node than that of the plan")
        assert main(["ps", "--nvml"]) == 2
        assert "--nvml: NVML here shows this machine alone" in capsys.readouterr().err
