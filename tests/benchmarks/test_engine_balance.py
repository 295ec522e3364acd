"""How far engines are from the mean of their model, as benchmarks/fleet_scale.py states it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from fleet_scale import balance_rows, p95
from simulated_cluster import Step


def write_steps(folder: Path, steps: list[Step]) -> None:
    (folder / "rack-0.jsonl").write_bytes(b"\n".join(msgspec.json.encode(step) for step in steps))


def test_balance_is_that_of_engines_to_the_mean_of_their_model(tmp_path: Path) -> None:
    steps = [
        *(Step(time_s, "a", 1, requests, 10, 5) for time_s, requests in ((1.0, 8), (2.0, 12))),  # 10 on average
        *(Step(time_s, "a", 2, 14, 30, 5) for time_s in (1.0, 2.0)),
        Step(1.5, "b", 3, 100, 1, 1),
        Step(9.0, "b", 3, 1, 1, 1),  # after the window
    ]
    write_steps(tmp_path, steps)
    rows = {row.work: row for row in balance_rows("w", tmp_path, 3, 1.0, 9.0)}
    assert rows["w: open requests of an engine off the mean, over 8 s, worst engine"].value == pytest.approx(2 / 12)
    assert rows["w: open requests of an engine off the mean, at a step, 95 % of steps"].value == pytest.approx(4 / 12)
    assert rows["w: tokens still to come of an engine off the mean, over 8 s, worst engine"].value == pytest.approx(0.5)
    assert rows["w: tokens held of an engine off the mean, over 8 s, worst engine"].value == 0
    assert rows["w: open requests of an engine off the mean, over 8 s, 95 % of engines"].met is False
    with pytest.raises(SystemExit, match="3 of 4 engines"):
        balance_rows("w", tmp_path, 4, 1.0, 9.0)


def test_p95_is_the_smallest_value_that_95_percent_do_not_exceed() -> None:
    assert p95([1.0]) == 1
    assert p95([float(number) for number in range(1, 21)]) == 19
    assert p95([float(number) for number in range(1, 101)]) == 95
