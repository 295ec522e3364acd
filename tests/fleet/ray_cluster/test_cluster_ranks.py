"""Tensor parallelism on one node of a cluster: two ranks answer as one does. Their GPUs are scripted."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from ray_nodes import POLICY, is_on_gpu_node, rows, start_nodes, sums_answers
from server_harness import RunningServer, fleet_command, running
from waiting import WAIT_S, wait_until

from meltcore.common.process import start_ticks

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ENGINE = (sys.executable, str(Path(__file__).with_name("cpu_engine.py")))
MODELS = """
server: {port: 0}
models:
  ranks: {checkpoint: meltcore/sums, tensor_parallel_size: 2, memory: 1GiB, max_num_seqs: 8}
  one: {checkpoint: meltcore/sums, device: cpu, memory: 384MiB, max_num_seqs: 8}
"""


def descendants(pid: int) -> list[int]:
    found = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found + [each for child in found for each in descendants(child)]


def ranks_of(server: RunningServer) -> list[int]:
    pid = next(row["pid"] for row in rows(server) if row["model"] == "ranks")
    return [pid, *descendants(pid)]


def test_two_ranks_on_a_node_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "fleet.yaml"
    path.write_text(MODELS)
    with (
        start_nodes(tmp_path, [40], [40, 40]) as cluster,
        running(fleet_command(path, POLICY, cluster.address, ENGINE), tmp_path / "err") as server,
    ):
        wait_until(lambda: [row["state"] for row in rows(server)] == ["ready"] * 2, "both ready")
        expected = sums_answers(server, "one")
        assert sums_answers(server, "ranks") == expected
        ranks = ranks_of(server)
        assert len(ranks) == 2
        assert is_on_gpu_node(ranks[0]), "the other node has one GPU"
        assert b"CUDA_VISIBLE_DEVICES=0,1" in Path(f"/proc/{ranks[0]}/environ").read_bytes().split(b"\0")

        # A killed rank ends the engine, which is started again on its node.
        os.kill(ranks[1], signal.SIGKILL)
        wait_until(lambda: "ranks has died" in server.stderr, "death reported")
        assert sums_answers(server, "one") == expected
        wait_until(lambda: [row["state"] for row in rows(server)] == ["ready"] * 2, "back")
        assert not any(map(start_ticks, ranks))
        assert sums_answers(server, "ranks") == expected
        ranks = ranks_of(server)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        wait_until(lambda: not any(map(start_ticks, ranks)), "no rank left")
    assert not list(tmp_path.glob("meltcore-*"))
