"""How the supervisor begins to load the models of a fleet: none waits for the hub's answers about another one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from server_harness import configure, make_model, running, serve_command
from waiting import WAIT_S, wait_until

from meltcore.common.errors import ConfigError
from meltcore.fleet.run import served_model
from meltcore.fleet.run.restart_policy import RestartAfterPause
from meltcore.fleet.run.served_model import ServedModel
from meltcore.fleet.supervisor import Supervisor
from meltcore.fleet.swap import turns
from meltcore.fleet.swap.residency import Demand
from meltcore.fleet.swap.turns import Turns
from meltcore.settings.fleet_spec import ModelSection, ResidencySection, TimeoutsSection


@pytest.mark.slow
def test_model_whose_configuration_hangs_holds_up_no_other(tmp_path: Path) -> None:
    """Models after it were unknown (404), no sleepable model was loaded, and SIGTERM was not acted on."""
    models = {
        name: ModelSection(
            checkpoint=str(make_model(tmp_path / name)),
            load_format="dummy",
            residency="sleepable" if name.startswith("turn") else "always_on",
        )
        for name in ("hangs", "turn_hangs", "serves", "turn_serves")
    }
    for name in ("hangs", "turn_hangs"):
        (tmp_path / name / "config.json").unlink()
        os.mkfifo(tmp_path / name / "config.json")  # no process writes to it
    command = serve_command(configure(models, port=0), policy=RestartAfterPause())
    with running(command, tmp_path / "stderr") as server:

        def statuses() -> dict[str, str]:
            return {each["name"]: each["status"] for each in server.request("GET", "/v1/status").json["models"]}

        wait_until(lambda: len(statuses()) == 4, "all models")
        wait_until(lambda: statuses()["serves"] == statuses()["turn_serves"] == "ready", "the models that can serve")
        assert statuses()["hangs"] == statuses()["turn_hangs"] == "loading"
        for name, status in (("serves", 200), ("turn_serves", 200), ("hangs", 503), ("turn_hangs", 503)):
            body = {"model": name, "prompt": "ab", "max_tokens": 1}
            assert server.post("/v1/completions", body).status == status
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(WAIT_S) == 0
        assert "engine_asleep" not in server.stderr, "a model that drains was to be loaded, in the place of another one"


def prepare(start_s: float) -> Any:
    """Let a model find its task. Return what `prepare` reads and changes of the model."""
    model: Any = SimpleNamespace(
        name="m",
        config=ModelSection(checkpoint="m"),
        stats=SimpleNamespace(task=""),
        prepared=asyncio.Event(),
        _add_to_api_servers=Mock(),
        _parts=SimpleNamespace(timeouts=TimeoutsSection(start_s=start_s), policy=RestartAfterPause()),
    )
    try:
        asyncio.run(ServedModel.prepare(model))
    finally:
        assert model.prepared.is_set()
    return model


def test_api_servers_learn_the_task_that_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_model, "find_task", lambda _: SimpleNamespace(name="embedding"))
    model = prepare(600.0)
    assert model.stats.task == model.task.name == "embedding"
    model._add_to_api_servers.assert_called_once_with("embedding")


def test_task_that_is_not_found_in_time_fails_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread delays neither the model's error nor the end of the event loop."""
    answered = threading.Event()
    monkeypatch.setattr(served_model, "find_task", lambda _: answered.wait(WAIT_S))
    with pytest.raises(ConfigError, match=r"^its configuration was not read within 0.1 s \(timeouts.start_s\)$"):
        prepare(0.1)
    answered.set()


@pytest.mark.parametrize(
    ("error", "text"),
    [(ConfigError("no --tokenizer"), "no models.m.tokenizer"), (KeyError("x"), "its configuration cannot be read: ")],
)
def test_error_of_a_task_fails_its_model(monkeypatch: pytest.MonkeyPatch, error: Exception, text: str) -> None:
    monkeypatch.setattr(served_model, "find_task", Mock(side_effect=error))
    with pytest.raises(ConfigError, match=f"^{text}"):
        prepare(600.0)


def upstream(number: int, *gpus: int, memory: int | None = None) -> Any:
    return SimpleNamespace(
        number=number,
        config=SimpleNamespace(memory=memory, replica_gpus=[gpus]),
        prepared=asyncio.Event(),
        is_sleepable=True,
        is_loading=True,
        status="loading",
        priority_class="standard",
        stats=None,
    )


def test_engine_without_a_budget_waits_for_those_before_it_on_its_gpus() -> None:
    """It would take the memory that a model has a budget for, whose configuration comes late."""
    before, elsewhere, measures, later = upstream(0, 0, 1, memory=1), upstream(1, 2), upstream(2, 1), upstream(3, 1)
    fleet: Any = SimpleNamespace(models={each.number: each for each in (before, elsewhere, measures, later)})

    async def waiting() -> list[bool]:
        tasks = [asyncio.create_task(Supervisor._wait_for_budgets(fleet, each)) for each in fleet.models.values()]
        await asyncio.sleep(0)
        return [not task.done() and task.cancel() for task in tasks]

    async def run() -> None:
        assert await waiting() == [False, False, True, True]
        before.prepared.set()
        assert await waiting() == [False, False, False, True]

    asyncio.run(run())


def test_first_loads_wait_a_while_for_models_whose_task_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the most urgent class is loaded last, but one model without a task does not keep all others from loading."""
    swaps = Turns(ResidencySection(), TimeoutsSection(), {})
    monkeypatch.setattr(turns, "time", SimpleNamespace(monotonic=lambda: 100.0))
    monkeypatch.setattr(turns, "asyncio", Mock())
    monkeypatch.setattr(swaps, "_run_until_cancelled", Mock())
    found, unknown = upstream(0, 0), upstream(1, 0)
    for each in (found, unknown):
        swaps.add(each)
    swaps.start()
    found.prepared.set()
    in_time_s, late_s, load = 100.0 + turns.ORDER_LIMIT_S, 100.1 + turns.ORDER_LIMIT_S, Demand(-1, is_forced=True)
    assert [swaps._demand(0, found, now_s) for now_s in (in_time_s, late_s)] == [Demand(), load]
    assert swaps._demand(1, unknown, late_s) == Demand()
    unknown.prepared.set()
    assert swaps._demand(1, unknown, in_time_s) == swaps._demand(0, found, in_time_s) == load


def test_signal_ends_a_start_that_waits_for_the_cluster() -> None:
    async def start() -> bool:
        fleet: Any = SimpleNamespace(_start_servers=asyncio.Event().wait, _stop=asyncio.Event())
        fleet._stop.set()
        return await Supervisor.start_each(fleet)

    assert not asyncio.run(start())
