"""A fleet of scripted engines on a scripted cluster, and what `ps` tells of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from places import program
from scripted_cluster import ScriptedCluster
from server_harness import MODEL, RunningServer, make_model, running

from meltcore.fleet.admin.admin import call_admin
from meltcore.fleet.daemon import find_fleet
from meltcore.fleet.run.restart_policy import RestartAfterPause

ENGINE = [sys.executable, str(program("scripted_engine.py"))]
POLICY = RestartAfterPause(first_pause_s=0.05, max_pause_s=0.1)  # five deaths are too many
TWO_MODELS = f"  {MODEL}: {{LOAD, device: cpu, memory: 64MiB}}\n  gpu: {{LOAD, memory: 2.5GiB}}\n"


def rows(server: RunningServer) -> dict[str, dict[str, Any]]:
    found = call_admin(find_fleet(server.port).admin, "GET", "/ps")
    return {f"{row['model']}.{row['replica']}": row for row in found}


def states(server: RunningServer) -> list[str]:
    return [row["state"] for row in rows(server).values()]


@contextmanager
def fleet(tmp_path: Path, cluster: ScriptedCluster, models: str, *options: str) -> Iterator[RunningServer]:
    path = tmp_path / "fleet.yaml"
    load = f"checkpoint: {make_model(tmp_path / 'model')}, load_format: dummy"
    path.write_text("server: {port: 0}\nmodels:\n" + models.replace("LOAD", load))
    with running(cluster.command(path, POLICY, [*ENGINE, *options]), tmp_path / "err") as server:
        yield server
        server.signal()
        assert server.wait_exit() == 0
