"""The totals of a plan's comparison with NVML: both sides have the driver's memory."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import plan_memory
import pytest

GIB = 2**30


def test_totals_are_all_bytes_in_use_against_the_plan_with_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = iter([GIB, 4 * GIB, 9 * GIB, 10 * GIB])  # idle, with a, with a and b, after requests
    rows: list[dict[str, Any]] = []
    for name, value in {
        "planned_bytes": lambda _path: ({"a": 3 * GIB, "b": 5 * GIB}, GIB),
        "used_bytes": lambda: next(used),
        "running_fleet": lambda *_: contextlib.nullcontext(),
        "wait_ready": lambda _name: "",
        "requests": lambda _fleet: None,
        "show": lambda line, *_: rows.append(line),
        "SETTLE_S": 0.0,
    }.items():
        monkeypatch.setattr(plan_memory, name, value)
    monkeypatch.setattr(plan_memory.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert plan_memory.measure({"models": {"a": {}, "b": {}}}, tmp_path, None) == 1
    assert [(row["model"], row["planned"] // GIB, row["measured"] // GIB) for row in rows] == [
        ("a", 3, 3),
        ("b", 5, 5),
        ("all, with the driver, after requests", 9, 10),
        ("all, with the driver", 9, 9),
    ]
