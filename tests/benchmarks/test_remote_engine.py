"""The cost of a remote engine: a small run through two real servers, and tokens that did not come."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import remote_engine
from remote_engine import Run, Stream, level_rows
from waiting import WAIT_S

BENCHMARK = Path(remote_engine.__file__)


@pytest.mark.slow
def test_engine_of_both_servers_is_measured() -> None:
    command = [sys.executable, str(BENCHMARK), "--quick", "--check-only"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = {}
    for line in done.stdout.splitlines()[1:]:
        work, _, value = line.rpartition(": ")
        found[work.partition("ms: ")[2]] = float(value.split()[0])
    assert found["CPU of the API server per token"] > 1
    assert 0.05 < found["engine's send to the client, median"] < 1000
    assert {"CPU of driver per token", "CPU of engine per token", "CPU of supervisor per token"} <= set(found)


def test_targets_bound_the_median_of_the_pairs() -> None:
    pairs = [(Run({"API server": 10.0}, 1.0, 2.0), Run({"API server": us}, ms, 9.0)) for us, ms in ((12, 3), (20, 1.5))]
    pairs.append((Run({"API server": 20.0}, 1.0, 2.0), Run({"API server": 26.0}, 2.5, 9.0)))
    rows, _ = level_rows(1, 20, pairs)
    assert [(round(row.value, 3), row.met) for row in rows if row.target] == [(1.3, False), (1.5, False)]


def test_tokens_are_counted_and_compared_also_where_several_come_in_one_event() -> None:
    async def answer(*parts: tuple[float, bytes]) -> Stream:
        stream = Stream()
        stream.on_head(200, {})
        for stream.now_s, text in parts:
            stream.on_body(b'data: {"choices":[{"index":0,"text":"%s"}]}\n\n' % text)
        stream.on_end()
        return stream

    assert asyncio.run(answer((1.0, b"a"), (2.0, b"bc"))).arrived_s(3) == [1.0, 2.0, 2.0]
    for wrong in (asyncio.run(answer((1.0, b"a"))), asyncio.run(answer((1.0, b"a"), (2.0, b"c"), (3.0, b"b")))):
        with pytest.raises(SystemExit, match="of 3 tokens"):
            wrong.arrived_s(3)
