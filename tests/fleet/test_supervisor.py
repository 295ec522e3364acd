"""How the supervisor begins to load the models of a fleet."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from waiting import WAIT_S

from meltcore.fleet import supervisor
from meltcore.fleet.plan.placement import PlacedFleet
from meltcore.fleet.supervisor import Supervisor
from meltcore.settings.fleet_spec import FleetSpec, ModelSection, TimeoutsSection


def started(start_s: float) -> list[tuple[str, Any]]:
    """Return the models of a fleet in the order in which it adds them, each with its task or error."""
    added: list[tuple[str, Any]] = []
    models = {name: ModelSection(checkpoint=name) for name in ("first", "second")}
    fleet: Any = SimpleNamespace(
        fleet=PlacedFleet(FleetSpec(models=models, timeouts=TimeoutsSection(start_s=start_s))),
        _launcher=AsyncMock(),
        _pool=AsyncMock(),
        turns=Mock(),
        _add_and_load=lambda name, task: added.append((name, task)),
    )
    fleet._find_task, fleet._start_order = (
        partial(each, fleet) for each in (Supervisor._find_task, Supervisor._start_order)
    )
    asyncio.run(Supervisor.start_each(fleet))
    return added


def test_tasks_of_all_models_are_found_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each model waited for the hub's answers about all models before it."""
    together = threading.Barrier(2, timeout=WAIT_S)
    monkeypatch.setattr(supervisor, "find_task", lambda _: together.wait() * 0)
    assert started(600.0) == [("first", 0), ("second", 0)]


def test_task_that_is_not_found_in_time_fails_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub without an answer kept the models after it from being added at all."""
    answered = threading.Event()

    def find_task(model: ModelSection) -> str:
        if model.checkpoint == "first":
            answered.wait(0.5)
        return "found"

    monkeypatch.setattr(supervisor, "find_task", find_task)
    (_, error), second = started(0.1)
    assert str(error) == "its configuration was not read within 0.1 s (timeouts.start_s)"
    assert second == ("second", "found")
